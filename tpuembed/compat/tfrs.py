"""TensorFlow Recommenders' embedding layers.

    from tensorflow_recommenders.layers.embedding import TPUEmbedding, translate_keras_optimizer
    from tensorflow_recommenders.experimental.layers.embedding import PartialTPUEmbedding

become `from tpuembed.compat.tfrs import ...`. `import tensorflow_recommenders as tfrs` becomes `from tpuembed.compat
import tfrs`, which has `tfrs.layers.embedding` and `tfrs.experimental.layers.embedding`. Optimizers are Keras 3's.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tpuembed.backends.checkpoint_keys import children_of
from tpuembed.backends.tf_config import (
    features_from,
    features_to_dict,
    optimizer_to_dict,
    optimizer_to_tf,
    resolve_optimizer,
)
from tpuembed.compat import module
from tpuembed.compat.partitioned_layer import PartitionedEmbedding, place_features
from tpuembed.config import FeatureConfig, TableConfig, feature_config_from_dict
from tpuembed.config.checks import check_count
from tpuembed.config.structure import flatten
from tpuembed.errors import ConfigError
from tpuembed.layer import TPUEmbedding
from tpuembed.lookup import as_tensors

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
    """Convert a Keras 3 optimizer to the `tf.tpu.experimental.embedding` optimizer with the same rule, which has more
    options.

    The learning rate stays the Keras optimizer's, read at every update. A schedule is evaluated at the layer's own
    count of updates. The slots belong to the layer, so the Keras optimizer need not be in the checkpoint.

    Raises:
        ConfigError: `optimizer` is not a Keras optimizer, or tables do not support it. The message names it.

    Source: `translate_keras_optimizer` of TensorFlow Recommenders.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            f"translate_keras_optimizer: {type(optimizer).__name__} is not a Keras 3 optimizer. Pass one, or "
            "pass this to the layer."
        )
    return optimizer_to_tf(resolve_optimizer(optimizer))


@dataclasses.dataclass(frozen=True)
class SmallEmbedding:
    """A small table of a `PartialTPUEmbedding`, with the attributes of a Keras `Embedding`.

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
        """Return the number of the table's rows."""
        return int(self.table.vocabulary_size)

    @property
    def output_dim(self) -> int:
        """Return the number of the table's columns."""
        return int(self.table.dim)

    @property
    def weights(self) -> list[Any]:
        """Return the table's variable, in a list."""
        return [self.embeddings]

    def get_weights(self) -> list[Any]:
        """Return the table's rows as numpy, in a list."""
        return [self.embeddings.numpy()]

    def __call__(self, ids: Any) -> Any:
        """Return the rows of `ids`, one by one."""
        return self.layer(ids, serving_config=FeatureConfig(self.table))


_LARGE, _SMALL = "tpu_embedding", "small_embedding"
_KERAS_LAYERS = "_keras_embedding_layers"
"""The checkpoint node where TensorFlow Recommenders saves small tables."""


@keras.saving.register_keras_serializable(package="tpuembed.compat.tfrs")
class PartialTPUEmbedding(PartitionedEmbedding):
    """Large tables for the embedding accelerator, small ones replicated with the dense part of the model.

    Small tables are ordinary trainable variables: the model's optimizer trains them. `optimizer` trains the large ones,
    on all hardware. A small table with its own optimizer is trained by that. Besides dense ids, small tables take
    sparse and ragged ones, which are combined.

    Args:
        feature_config: {feature name: FeatureConfig}, TensorFlow's or tpuembed's.
        optimizer: for the large tables: any optimizer that `TPUEmbedding` takes.
        pipeline_execution_with_tensor_core: overlap lookups of large tables with dense computation.
        batch_size: examples of one step of all replicas, for accelerators that need it when the layer is built.
        size_threshold: tables with more rows are large. None makes all tables small, 0 or less makes all large.
        name: as for every Keras layer.
        **kwargs: the same.

    Raises:
        ConfigError: a config is not supported. The message names it.

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
        placement = place_features(features, lambda config: _place(config.table.vocabulary_size, size_threshold))
        makers = {_LARGE: self._large_layer, _SMALL: _small_layer}
        parts = {place: placement.part(place, features) for place in makers}
        self._set_parts(placement, {place: makers[place](part) for place, part in parts.items() if part})

    def _large_layer(self, features: dict[str, Any]) -> TPUEmbedding:
        return TPUEmbedding(
            features, self._optimizer, self._pipelining, _per_replica(self._batch_size), name=f"{self.name}_large"
        )

    def _source(self, table: str, names: Iterable[str]) -> str:
        """Return the name of `table`, or of one of its features. TensorFlow Recommenders saves a small table by a
        feature's name."""
        features = [path for path, config in flatten(self._placement.value.structure) if config.table.name == table]
        return next((name for name in (table, *sorted(features)) if name in set(names)), table)

    def _other_names(self, keys: Iterable[str]) -> set[str]:
        return children_of(keys, _KERAS_LAYERS)

    @tf.autograph.experimental.do_not_convert
    def __call__(self, inputs: Mapping[str, Any], **kwargs: Any) -> Any:
        """Run `call`, as Keras calls it. Ids may also be Python integers and lists of them."""
        return super().__call__(as_tensors(self._placement.value.structure, inputs, "features"), **kwargs)

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return {feature name: activations} of {feature name: ids}, as `TPUEmbedding` does."""
        activations: dict[str, Any] = self._look_up(self._placement.value.unpack(inputs, "features"), None)
        return activations

    def compute_output_spec(self, inputs: Mapping[str, Any]) -> Any:
        """Return the symbolic activations of symbolic `inputs`."""
        placement, found = self._placement.value, dict[str, Any]()
        ids = placement.unpack(inputs, "features")
        for place, layer in self._parts:
            found.update(layer.compute_output_spec(placement.part(place, ids)))
        return placement.pack(found)

    @property
    def tpu_embedding(self) -> TPUEmbedding | None:
        """Return the layer of the large tables. Returns None if there are none."""
        return self.part(_LARGE)

    @property
    def keras_embedding_layers(self) -> dict[str, "SmallEmbedding"]:
        """Return the small table, like a Keras `Embedding`, of each feature by name. Features share their table's entry."""
        layer, placement = self.part(_SMALL), self._placement.value
        if layer is None or not layer.embedding_tables:  # an export has no variables
            return {}
        variables = {config.name: (config, variable) for config, variable in layer.embedding_tables.items()}
        tables = {name: SmallEmbedding(layer, *found) for name, found in variables.items()}
        configs = dict(flatten(placement.structure))
        return {path: tables[configs[path].table.name] for path, place in placement.places.items() if place == _SMALL}

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """Return the variable, float32 [vocabulary_size, dim], of each TableConfig as it was passed."""
        variables = self.table_variables()
        return {table: variables[name] for table, name in self._table_names if name in variables}

    def get_config(self) -> dict[str, Any]:
        """Return the config, without weights. A live learning rate is written as its current value."""
        return {
            **self._plain_config(),
            "feature_config": features_to_dict(self._placement.value.structure),
            "optimizer": None if self._optimizer is None else optimizer_to_dict(self._optimizer),
            "pipeline_execution_with_tensor_core": self._pipelining,
            "batch_size": self._batch_size,
            "size_threshold": self._size_threshold,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PartialTPUEmbedding":
        """Return the layer that `get_config` described."""
        return cls(**{**config, "feature_config": feature_config_from_dict(config["feature_config"])})


def _place(rows: int, threshold: int | None) -> str:
    return _LARGE if threshold is not None and rows > threshold else _SMALL


def _features(feature_config: Any) -> tuple[dict[str, Any], tuple[tuple[Any, str], ...]]:
    """Return ({name: tpuembed's FeatureConfig}, ((TableConfig as it was passed, table name), ...))."""
    nested = not isinstance(feature_config, Mapping) or len(list(flatten(feature_config))) != len(feature_config)
    if nested or any(isinstance(config, Mapping | list | tuple) for config in feature_config.values()):
        raise ConfigError(
            "PartialTPUEmbedding: feature_config must be a flat dict {name: FeatureConfig}. For a nested structure, use "
            "tpuembed.TPUEmbedding, whose size_threshold replicates small tables."
        )
    features, names = features_from(feature_config)
    return features, tuple(names.items())


def _small_layer(features: dict[str, Any]) -> TPUEmbedding:
    return TPUEmbedding(features, None, embedding_feature="UNSUPPORTED")


def _per_replica(batch_size: int | None) -> int | None:
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if batch_size is not None and batch_size % replicas:
        raise ConfigError(
            f"PartialTPUEmbedding: batch_size={batch_size} is the batch of all {replicas} replicas and cannot be divided "
            f"among them. Make it a multiple of {replicas}."
        )
    return None if batch_size is None else batch_size // replicas


# The modules of TensorFlow Recommenders, by their names.
_EMBEDDING = f"{__name__}.layers.embedding"
tpu_embedding_layer = module(
    f"{_EMBEDDING}.tpu_embedding_layer", TPUEmbedding=TPUEmbedding, translate_keras_optimizer=translate_keras_optimizer
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
