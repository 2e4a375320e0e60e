"""The fixed models whose ops are golden, and a batch for each."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Final

import keras
import numpy as np

from tpuembed import FeatureConfig, TableConfig
from tpuembed.config import FTRL, SGD, Adagrad, AdagradMomentum, Adam, QuantizationConfig

__all__ = ["BATCH", "MODELS", "Ids", "Model"]

Array = np.ndarray[Any, Any]

BATCH: Final = 4
"""Examples of one replica."""


@dataclasses.dataclass(frozen=True)
class Ids:
    """One feature's ids of one replica's batch.

    Attributes:
        counts: [examples] how many ids an example has.
        values: [ids] the ids of all examples, one after another.
        weights: [ids], or None.
    """

    counts: Array
    values: Array
    weights: Array | None


@dataclasses.dataclass(frozen=True)
class Model:
    """Arguments of a layer, and the kind of every feature's ids.

    Attributes:
        features: sorted by name, as the layer sorts them.
        kinds: feature -> sparse, ragged or dense.
        weighted: the features that have weights.
        replicas: TPU cores.
        rates: optimizer's learning rate at the first step by table, where it is live.
    """

    features: Mapping[str, FeatureConfig]
    kinds: Mapping[str, str]
    weighted: frozenset[str]
    replicas: int
    pipelining: bool
    optimizer: Any = None
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def tables(self) -> list[TableConfig]:
        """By their first use in the features."""
        return list({feature.table.name: feature.table for feature in self.features.values()}.values())

    def shape(self, feature: str) -> tuple[int, ...]:
        """Of one replica's activations, without the last dimension."""
        config = self.features[feature]
        length = (config.max_sequence_length,) if config.max_sequence_length else ()
        return config.output_shape or (BATCH, *length)  # type: ignore[return-value]

    def batch(self, replica: int) -> dict[str, Ids]:
        """Different for every replica; some ids are twice in an example, and some examples have none."""
        random = np.random.default_rng(replica + 1)
        return {name: self._ids(random, name, feature) for name, feature in self.features.items()}

    def _ids(self, random: np.random.Generator, name: str, feature: FeatureConfig) -> Ids:
        dense = self.kinds[name] == "dense"
        counts = np.ones(BATCH, int) if dense else np.append(random.integers(0, 5, BATCH - 2), [0, 3])
        shape = self.shape(name) if dense else (int(counts.sum()),)
        values = random.integers(0, feature.table.vocabulary_size, shape)
        weights = random.random(len(values)).astype(np.float32) if name in self.weighted else None
        return Ids(counts, values, weights)


def _five_optimizers() -> Model:
    """Every optimizer, no hyper-parameter at its default."""
    adam = Adam(
        learning_rate=0.5,
        beta_1=0.8,
        beta_2=0.95,
        epsilon=1e-2,
        lazy_adam=False,
        sum_inside_sqrt=False,
        clip_weight_min=-2.0,
        clip_weight_max=3.0,
        clipvalue=(-0.25, 0.75),
        weight_decay_factor=0.125,
        multiply_weight_decay_factor_by_learning_rate=True,
    )
    momentum = AdagradMomentum(
        learning_rate=0.0625,
        momentum=0.7,
        use_nesterov=True,
        exponent=3.0,
        beta2=0.85,
        epsilon=1e-3,
        clip_weight_max=4.0,
    )
    ftrl = FTRL(
        learning_rate=0.25,
        learning_rate_power=-0.4,
        l1_regularization_strength=0.1,
        l2_regularization_strength=0.2,
        beta=0.3,
        initial_accumulator_value=0.6,
        multiply_linear_by_learning_rate=True,
        allow_zero_accumulator=True,
        clip_weight_min=-5.0,
    )
    adagrad = Adagrad(
        learning_rate=0.375, initial_accumulator_value=0.9, clipvalue=(None, 1.5), weight_decay_factor=0.0625
    )
    sgd = SGD(learning_rate=0.125, use_gradient_accumulation=False)
    items = TableConfig(30, 8, "items", combiner="mean", optimizer=momentum)
    return Model(
        features={
            "clicks": FeatureConfig(TableConfig(50, 4, "clicks_table", combiner="sum", optimizer=adam)),
            "history": FeatureConfig(items, max_sequence_length=3),
            "item": FeatureConfig(items, name="the_item"),
            "queries": FeatureConfig(TableConfig(40, 16, "queries", combiner="sqrtn", optimizer=ftrl)),
            "rare": FeatureConfig(TableConfig(1, 4, "rare", combiner="sum", optimizer=sgd)),
            "user": FeatureConfig(
                TableConfig(60, 8, "users", optimizer=adagrad, quantization_config=QuantizationConfig(256, -1.0, 2.0))
            ),
        },
        kinds={**dict.fromkeys(("clicks", "history", "queries", "rare", "user"), "sparse"), "item": "dense"},
        weighted=frozenset({"clicks", "queries"}),
        replicas=2,
        pipelining=True,
    )


def _defaults() -> Model:
    """Every optimizer by its name."""
    kinds = ("adagrad", "adagrad_momentum", "adam", "ftrl", "sgd")
    combiners = ("sum", "mean", "sqrtn", "mean", "sqrtn")
    return Model(
        features={
            f"of {kind}": FeatureConfig(TableConfig(20 + i, 4, kind, combiner=combiner, optimizer=kind))
            for i, (kind, combiner) in enumerate(zip(kinds, combiners, strict=True))
        },
        kinds={f"of {kind}": "ragged" for kind in kinds},
        weighted=frozenset({"of adagrad_momentum", "of ftrl", "of sgd"}),
        replicas=1,
        pipelining=False,
    )


def _live_rates() -> Model:
    """Two schedules for three tables, and a constant; ids of every kind that may stand together."""
    first, second = (keras.optimizers.schedules.PiecewiseConstantDecay([5], [rate, 1.0]) for rate in (0.5, 0.75))
    adagrad, adam = Adagrad(learning_rate=first), Adam(learning_rate=second)
    return Model(
        features={
            "a": FeatureConfig(TableConfig(11, 4, "a", optimizer=adam)),
            "b": FeatureConfig(TableConfig(12, 4, "b", optimizer=adagrad), output_shape=(BATCH, 2)),
            "c": FeatureConfig(TableConfig(13, 4, "c", optimizer=SGD(learning_rate=0.25), combiner="sum")),
            "d": FeatureConfig(TableConfig(14, 8, "d", optimizer=adam)),
        },
        kinds={"a": "sparse", "b": "dense", "c": "sparse", "d": "sparse"},
        weighted=frozenset({"d"}),
        replicas=4,
        pipelining=False,
        rates={"a": 0.75, "b": 0.5, "d": 0.75},
    )


MODELS: Final = {
    "five_optimizers": functools.cache(_five_optimizers),
    "defaults": functools.cache(_defaults),
    "live_rates": functools.cache(_live_rates),
}
"""Name -> what makes the model."""
