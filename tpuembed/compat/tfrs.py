"""TensorFlow Recommenders' embedding layers.

    from tensorflow_recommenders.layers.embedding import TPUEmbedding, translate_keras_optimizer
    from tensorflow_recommenders.experimental.layers.embedding import PartialTPUEmbedding

become `from tpuembed.compat.tfrs import ...`, and `import tensorflow_recommenders as tfrs` becomes
`from tpuembed.compat import tfrs`, which has `tfrs.layers.embedding` and `tfrs.experimental.layers.embedding`. Optimizers are
Keras 3's.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tpuembed.backends.feature_input import as_tensors
from tpuembed.backends.saved_places import children_of
from tpuembed.backends.tf_config import (
    features_from,
    features_to_dict,
    optimizer_to_dict,
    optimizer_to_tf,
    resolve_optimizer,
)
from tpuembed.compat import module
from tpuembed.compat.divided import DividedEmbedding, divide
from tpuembed.config import FeatureConfig, TableConfig, feature_config_from_dict
from tpuembed.config.checks import check_count
from tpuembed.config.structure import flatten
from tpuembed.errors import ConfigError
from tpuembed.layer import TPUEmbedding

__all__ = [
    "PartialTPUEmbedding",
    "SmallEmbedding",
    "TPUEmbedding",
    "experimental",
    "layers",
    "partial_tpu_embedding",
    "tpu_embedding_layer",
    "translate_keras_optimizer",
]


def translate_keras_optimizer(optimizer: Any) -> Any:
    """A Keras 3 optimizer as the `tf.tpu.experimental.embedding` optimizer of the same rule, to set what only that has.

    The learning rate stays the Keras optimizer's, read at every update; a schedule is evaluated at the layer's own count of
    updates. Slots belong to the layer: the Keras optimizer need not be in the checkpoint.

    Raises:
        ConfigError: no Keras optimizer, or one that tables cannot honour, by name.

    Source: `translate_keras_optimizer` of TensorFlow Recommenders.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            f"translate_keras_optimizer: {optimizer!r} is no Keras 3 optimizer; pass one, or give it to the layer as it is"
        )
    return optimizer_to_tf(resolve_optimizer(optimizer))


@dataclasses.dataclass(frozen=True)
class SmallEmbedding:
    """A small table of a `PartialTPUEmbedding`, with the names that a Keras `Embedding` has for it.

    Attributes:
        layer: the layer that holds all small tables.
        table: its config.
        embeddings: its variable, float32 [vocabulary_size, dim].
    """

    layer: TPUEmbedding
    table: TableConfig
    embeddings: Any

    @property
    def input_dim(self) -> int:
        """The table's rows."""
        return int(self.table.vocabulary_size)

    @property
    def output_dim(self) -> int:
        """The table's columns."""
        return int(self.table.dim)

    @property
    def weights(self) -> list[Any]:
        """The table alone."""
        return [self.embeddings]

    def get_weights(self) -> list[Any]:
        """The table's rows, as numpy."""
        return [self.embeddings.numpy()]

    def __call__(self, ids: Any) -> Any:
        """Return the rows of `ids`, one by one."""
        return self.layer(ids, serving_config=FeatureConfig(self.table))


_LARGE, _SMALL = "tpu_embedding", "small_embedding"
_KERAS_LAYERS = "_keras_embedding_layers"
"""Where TensorFlow Recommenders saves small tables."""


@keras.saving.register_keras_serializable(package="tpuembed.compat.tfrs")
class PartialTPUEmbedding(DividedEmbedding):
    """Large tables for the embedding accelerator, small ones replicated beside the dense part of the model.

    Small tables are ordinary trainable variables: the model's optimizer trains them. `optimizer` trains the large ones, on
    every hardware. A small table with an optimizer of its own is trained by that. Besides dense ids, small tables take
    sparse and ragged ones, which are combined.

    Args:
        feature_config: {feature name: FeatureConfig}, TensorFlow's or tpuembed's.
        optimizer: of the large tables: whatever `TPUEmbedding` takes.
        pipeline_execution_with_tensor_core: overlap lookups of large tables with dense computation.
        batch_size: examples of one step of all replicas, for accelerators that must know it when the layer is built.
        size_threshold: tables of more rows are large; None for none of them, 0 or less for all.
        name, **kwargs: as for every Keras layer.

    Raises:
        ConfigError: a config that cannot be honoured, by name.

    Source: `PartialTPUEmbedding` of TensorFlow Recommenders.
    """

    PLACES = (_LARGE, _SMALL)

    def __init__(
        self,
        feature_config: Mapping[str, Any],
        optimizer: Any,
        pipeline_execution_with_tensor_core: bool = False,
        batch_size: int | None = None,
        size_threshold: int | None = 10_000,
        *,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, autocast=False, **kwargs)
        if size_threshold is not None:
            check_count("PartialTPUEmbedding: size_threshold", size_threshold, -(2**63))
        features, self._table_names = _features(feature_config)
        self._optimizer = None if optimizer is None else resolve_optimizer(optimizer)
        self._pipelining, self._batch_size, self._size_threshold = (
            pipeline_execution_with_tensor_core,
            batch_size,
            size_threshold,
        )
        division = divide(features, lambda config: _place(config.table.vocabulary_size, size_threshold))
        makers = {_LARGE: self._large_layer, _SMALL: _small_layer}
        parts = {place: division.part(place, features) for place in makers}
        self._set_parts(division, {place: makers[place](part) for place, part in parts.items() if part})

    def _large_layer(self, features: dict[str, Any]) -> TPUEmbedding:
        return TPUEmbedding(
            features, self._optimizer, self._pipelining, _per_replica(self._batch_size), name=f"{self.name}_large"
        )

    def _source(self, table: str, names: Iterable[str]) -> str:
        """TensorFlow Recommenders saves a small table by one of its features."""
        features = [path for path, config in flatten(self._division.value.structure) if config.table.name == table]
        return next((name for name in (table, *sorted(features)) if name in set(names)), table)

    def _other_names(self, keys: Iterable[str]) -> set[str]:
        return children_of(keys, _KERAS_LAYERS)

    @tf.autograph.experimental.do_not_convert
    def __call__(self, inputs: Mapping[str, Any], **kwargs: Any) -> Any:
        """`call`, as Keras calls it; ids may also be Python's integers and lists of them."""
        return super().__call__(as_tensors(self._division.value.structure, inputs, "features"), **kwargs)

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """{feature name: ids} -> {feature name: activations}, as `TPUEmbedding` gives them."""
        activations: dict[str, Any] = self._look_up(self._division.value.unpack(inputs, "features"), None)
        return activations

    def compute_output_spec(self, inputs: Mapping[str, Any]) -> Any:
        """The symbolic activations of symbolic `inputs`."""
        return self._specs(self._division.value.unpack(inputs, "features"))

    @property
    def tpu_embedding(self) -> TPUEmbedding | None:
        """The layer of the large tables; None where there are none."""
        return self.part(_LARGE)

    @property
    def keras_embedding_layers(self) -> dict[str, "SmallEmbedding"]:
        """{name of a feature of a small table: that table, as a Keras `Embedding` shows it}; features share a table's."""
        layer, division = self.part(_SMALL), self._division.value
        if layer is None or not layer.embedding_tables:  # an export holds none
            return {}
        variables = {config.name: (config, variable) for config, variable in layer.embedding_tables.items()}
        tables = {name: SmallEmbedding(layer, *found) for name, found in variables.items()}
        configs = dict(flatten(division.structure))
        return {path: tables[configs[path].table.name] for path, place in division.places.items() if place == _SMALL}

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """{TableConfig as it was passed: its variable, float32 [vocabulary_size, dim]}."""
        variables = self.table_variables()
        return {table: variables[name] for table, name in self._table_names if name in variables}

    def get_config(self) -> dict[str, Any]:
        """Everything but the weights. A live learning rate is written as the number that it is now."""
        return {
            **self._plain_config(),
            "feature_config": features_to_dict(self._division.value.structure),
            "optimizer": None if self._optimizer is None else optimizer_to_dict(self._optimizer),
            "pipeline_execution_with_tensor_core": self._pipelining,
            "batch_size": self._batch_size,
            "size_threshold": self._size_threshold,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PartialTPUEmbedding":
        """The layer that `get_config` described."""
        return cls(**{**config, "feature_config": feature_config_from_dict(config["feature_config"])})


def _place(rows: int, threshold: int | None) -> str:
    return _LARGE if threshold is not None and rows > threshold else _SMALL


def _features(feature_config: Any) -> tuple[dict[str, Any], tuple[tuple[Any, str], ...]]:
    """({name: our FeatureConfig}, ((TableConfig as it was passed, table name), ...))."""
    nested = not isinstance(feature_config, Mapping) or len(list(flatten(feature_config))) != len(feature_config)
    if nested or any(isinstance(config, Mapping | list | tuple) for config in feature_config.values()):
        raise ConfigError(
            "PartialTPUEmbedding: feature_config must be a flat dict {name: FeatureConfig}; tpuembed.TPUEmbedding takes any "
            "nested structure, and its size_threshold replicates small tables"
        )
    features, names = features_from(feature_config)
    return features, tuple(names.items())


def _small_layer(features: dict[str, Any]) -> TPUEmbedding:
    return TPUEmbedding(features, None, embedding_feature="UNSUPPORTED")


def _per_replica(batch_size: int | None) -> int | None:
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if batch_size is not None and batch_size % replicas:
        raise ConfigError(
            f"PartialTPUEmbedding: batch_size={batch_size} counts the examples of all {replicas} replicas and cannot be "
            "divided among them; make it a multiple"
        )
    return None if batch_size is None else batch_size // replicas


# The modules of TensorFlow Recommenders, by their names.
_EMBEDDING = f"{__name__}.layers.embedding"
tpu_embedding_layer = module(
    f"{_EMBEDDING}.tpu_embedding_layer",
    TPUEmbedding=TPUEmbedding,
    translate_keras_optimizer=translate_keras_optimizer,
)
layers = module(
    f"{__name__}.layers",
    embedding=module(_EMBEDDING, TPUEmbedding=TPUEmbedding, tpu_embedding_layer=tpu_embedding_layer),
)
_EXPERIMENTAL = f"{__name__}.experimental"
partial_tpu_embedding = module(
    f"{_EXPERIMENTAL}.layers.embedding.partial_tpu_embedding", PartialTPUEmbedding=PartialTPUEmbedding
)
experimental = module(
    _EXPERIMENTAL,
    layers=module(
        f"{_EXPERIMENTAL}.layers",
        embedding=module(
            f"{_EXPERIMENTAL}.layers.embedding",
            PartialTPUEmbedding=PartialTPUEmbedding,
            partial_tpu_embedding=partial_tpu_embedding,
        ),
    ),
)
