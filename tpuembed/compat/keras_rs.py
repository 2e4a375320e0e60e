"""keras-rs' embedding layer: replace `import keras_rs` by `from tpuembed.compat import keras_rs`.

`DistributedEmbedding` and its configs are in `keras_rs.layers`, and also in `keras_rs` itself.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tpuembed.backends.tf_config import optimizer_to_dict, resolve_optimizer
from tpuembed.backends.tpu.tf_tpu import embedding_feature, is_tpu_strategy, tpu_call
from tpuembed.compat import module
from tpuembed.compat.keras_rs_config import FeatureConfig, TableConfig
from tpuembed.compat.partitioned_layer import PartitionedEmbedding, place_features
from tpuembed.config import FeatureConfig as LayerFeature
from tpuembed.config.checks import differing
from tpuembed.config.structure import check_plain, flatten, map_leaves
from tpuembed.errors import ConfigError
from tpuembed.layer import TPUEmbedding
from tpuembed.lookup import as_tensors
from tpuembed.lookup.ids import Ids, RaggedIds, SparseIds, kind_of
from tpuembed.runtime.table_scope import current_source

__all__ = ["DistributedEmbedding", "FeatureConfig", "TableConfig", "layers"]

Tensor = Any

_PREPROCESSED = "preprocessed_inputs_per_placement"
_SPARSECORE, _DEFAULT = "sparsecore", "default_device"


@keras.saving.register_keras_serializable(package="tpuembed.compat.keras_rs")
class DistributedEmbedding(PartitionedEmbedding):
    """Looks up features in tables. Each table is placed on the TPU's embedding hardware or with the rest of the model.

    Every table is trained by its own optimizer, in any placement. The optimizer of `compile` trains the rest. Dense ids
    [batch, ids] are combined, like sparse and ragged ones. An export finds the tables in any placement.

    Args:
        feature_configs: a nested structure of FeatureConfig.
        table_stacking: "auto", or None for one stack per table. Only SparseCores stack tables.
        update_stats: must be False.
        optimizer: for tables without their own.
        pipeline_execution_with_tensor_core: overlap lookups with dense computation.
        sparse_core_embedding_config: must be None.
        **kwargs: as for every Keras layer.

    Raises:
        ConfigError: a config is not supported. The message names it.

    Source: `keras_rs.layers.DistributedEmbedding` on its TensorFlow backend.
    """

    PLACES = (_SPARSECORE, _DEFAULT)

    def __init__(
        self,
        feature_configs: Any,
        *,
        table_stacking: Any = "auto",
        update_stats: bool = False,
        optimizer: Any = None,
        pipeline_execution_with_tensor_core: bool = False,
        sparse_core_embedding_config: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(autocast=False, **kwargs)
        _check_options(table_stacking, update_stats, sparse_core_embedding_config)
        self._options = _Options(
            table_stacking,
            None if optimizer is None else resolve_optimizer(optimizer),
            pipeline_execution_with_tensor_core,
        )
        placement = place_features(feature_configs, _place)
        configs = dict(flatten(feature_configs))
        _check_features(configs, optimizer)
        parts = {place: placement.part(place, configs) for place in (_SPARSECORE, _DEFAULT)}
        makers = {_SPARSECORE: self._on_hardware, _DEFAULT: self._on_default_device}
        self._set_parts(placement, {place: makers[place](part) for place, part in parts.items() if part})
        self._configs = _Configs(configs, _unchangeable(parts[_SPARSECORE]))

    def _on_hardware(self, features: dict[str, Any]) -> TPUEmbedding:
        options = self._options
        return TPUEmbedding(
            _layer_features(features, _per_replica_shape),
            options.optimizer,
            options.pipelining,
            sparse_core_embedding_config=options.sparse_core(),
            name=f"{self.name}_{_SPARSECORE}",
        )

    def _on_default_device(self, features: dict[str, Any]) -> TPUEmbedding:
        return TPUEmbedding(
            _layer_features(features, lambda _: None), self._options.optimizer, embedding_feature="UNSUPPORTED"
        )

    # ---- lookup

    def preprocess(self, inputs: Any, weights: Any = None, training: bool = False) -> dict[str, Any]:  # noqa: ARG002
        """Return `inputs` and `weights` by placement, in a form that `call` also takes. Calling it is optional.

        Raises:
            ConfigError: their structure differs from `feature_configs`.
        """
        placement = self._placement.value
        given = {"inputs": placement.unpack(as_tensors(placement.structure, inputs, "inputs"), "inputs")}
        if weights is not None:
            given["weights"] = placement.unpack(as_tensors(placement.structure, weights, "weights"), "weights")
        return {
            _PREPROCESSED: {
                place: {what: placement.part(place, leaves) for what, leaves in given.items()} for place in self._places
            }
        }

    @tf.autograph.experimental.do_not_convert
    def __call__(self, inputs: Any, weights: Any = None, **kwargs: Any) -> Any:
        """Run `call`, as Keras calls it. Ids and weights may also be Python numbers and lists of them."""
        if isinstance(inputs, Mapping) and _PREPROCESSED in inputs:
            return super().__call__(inputs, *(() if weights is None else (weights,)), **kwargs)
        structure = self._placement.value.structure
        given = () if weights is None else (as_tensors(structure, weights, "weights"),)
        return super().__call__(as_tensors(structure, inputs, "inputs"), *given, **kwargs)

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs: Any, weights: Any = None, training: bool = False) -> Any:
        """Return the structure of `feature_configs` with activations at its leaves.

        Args:
            inputs: that structure with ids at its leaves, or the result of `preprocess`.
            weights: None, or the same structure with weights of the ids' kind and shape.
            training: has no effect. Tables are trained when a gradient is taken.
        """
        ids, given = self._leaves(inputs, weights, training)
        known = self._configs
        pairs = {
            path: _prepare(known.features[path], leaf, None if given is None else given[path], path in known.unchanged)
            for path, leaf in ids.items()
        }
        of_pairs = None if given is None else {path: weight for path, (_, weight) in pairs.items()}
        return self._look_up({path: ids for path, (ids, _) in pairs.items()}, of_pairs)

    def _leaves(
        self, inputs: Any, weights: Any, training: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        if not (isinstance(inputs, Mapping) and _PREPROCESSED in inputs):
            inputs = self.preprocess(inputs, weights, training)
        parts = list(inputs[_PREPROCESSED].values())
        ids = {path: leaf for part in parts for path, leaf in part["inputs"].items()}
        if not all("weights" in part for part in parts):
            return ids, None
        return ids, {path: leaf for part in parts for path, leaf in part["weights"].items()}

    def compute_output_spec(self, inputs: Any, weights: Any = None, training: bool = False) -> Any:
        """Return the symbolic activations of symbolic `inputs`."""
        ids, _ = self._leaves(inputs, weights, training)
        shapes = {path: config.output_shape[1:] for path, config in self._configs.features.items()}
        specs = {
            path: keras.KerasTensor((leaf.shape[0], *shapes[path]), self.compute_dtype) for path, leaf in ids.items()
        }
        return self._placement.value.pack(specs)

    def compute_output_shape(self, input_shapes: Any) -> Any:  # noqa: ARG002 - the configs give it
        """Return the output_shape of every feature, with the batch of all replicas."""
        return map_leaves(lambda config: config.output_shape, self._placement.value.structure)

    # ---- tables

    def get_embedding_tables(self) -> dict[str, Any]:
        """Return {table name: numpy float32 [vocabulary_size, dim]}, in any placement."""
        return {name: variable.numpy() for name, variable in self.table_variables().items()}

    def set_embedding_tables(self, tables: Mapping[str, Any]) -> None:
        """Overwrite tables. Other tables, and all slots, stay unchanged.

        Args:
            tables: {table name: float32 [vocabulary_size, dim]}.

        Raises:
            UnknownTableError: the layer has no such table.
            ConfigError: the shape or dtype differs from the table's.
        """
        layers_by_table = {name: self._layer_of(name) for name in tables}
        for name, values in tables.items():
            layers_by_table[name].update_embedding_table(name, values)

    # ---- saving

    def get_config(self) -> dict[str, Any]:
        """Return the config, without weights. A table that features share is written once, under `tables`."""
        structure = self._placement.value.structure
        check_plain(structure)
        tables = list({id(config.table): config.table for _, config in flatten(structure)}.values())
        order = {id(table): index for index, table in enumerate(tables)}
        features = map_leaves(lambda config: {**config.get_config(), "table": order[id(config.table)]}, structure)
        return {
            **self._plain_config(),
            "feature_configs": features,
            "tables": [table.get_config() for table in tables],
            **self._options.to_dict(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DistributedEmbedding":
        """Return the layer that `get_config` described."""
        rest = dict(config)
        tables = [TableConfig.from_config(table) for table in rest.pop("tables")]
        return cls(_features_from(rest.pop("feature_configs"), tables), **rest)


@dataclasses.dataclass(frozen=True)
class _Options:
    """The layer's arguments besides its features."""

    table_stacking: Any
    optimizer: Any
    pipelining: bool

    def sparse_core(self) -> Any:
        """Return TensorFlow's config of SparseCores. None takes its defaults."""
        if self.table_stacking is None and embedding_feature(tf.distribute.get_strategy()) == "V2":
            return tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig(disable_table_stacking=True)
        return None

    def to_dict(self) -> dict[str, Any]:
        return {
            "table_stacking": self.table_stacking,
            "optimizer": None if self.optimizer is None else optimizer_to_dict(self.optimizer),
            "pipeline_execution_with_tensor_core": self.pipelining,
        }


@dataclasses.dataclass(frozen=True)
class _Configs:
    """The features by path.

    Attributes:
        features: path -> FeatureConfig.
        unchanged: the paths of the features whose ids the hardware takes only as they are.
    """

    features: Mapping[str, FeatureConfig]
    unchanged: frozenset[str]


def _check_options(table_stacking: Any, update_stats: bool, sparse_core_config: Any) -> None:
    if update_stats:
        raise ConfigError(
            "DistributedEmbedding: update_stats=True needs keras-rs on JAX. "
            "`tpuembed sparsecore-limits` counts the ids of a sample."
        )
    if table_stacking not in ("auto", None):
        raise ConfigError(
            f"DistributedEmbedding: table_stacking={table_stacking!r} is not supported, because TensorFlow chooses the stacks. "
            "Pass 'auto', or None to stack no tables."
        )
    if sparse_core_config is not None:
        raise ConfigError(
            "DistributedEmbedding: sparse_core_embedding_config is not supported. Set max_ids_per_partition and "
            "max_unique_ids_per_partition of the TableConfig, and table_stacking of the layer."
        )


def _place(config: Any) -> str:
    """Return the place of the feature's table. In an export the rows come from a checkpoint, so the hardware does not matter."""
    if not isinstance(config, FeatureConfig):
        raise ConfigError(
            f"DistributedEmbedding: feature_configs must have tpuembed.compat.keras_rs.FeatureConfig, got {type(config).__name__}. "
            "For TensorFlow's configs use tpuembed.TPUEmbedding."
        )
    wanted = config.table.placement
    if wanted == _DEFAULT or current_source() is not None:
        return _DEFAULT
    strategy = tf.distribute.get_strategy()
    found = is_tpu_strategy(strategy) and embedding_feature(strategy) in ("V1", "V2")
    if wanted == _SPARSECORE and not found:
        raise ConfigError(
            f"table {config.table.name!r}: placement 'sparsecore' needs a TPUStrategy over TPUs with embedding hardware. The "
            f"layer is created under {type(strategy).__name__}. Use 'auto' to place it on that hardware only if it exists."
        )
    return _SPARSECORE if found else _DEFAULT


def _unchangeable(on_hardware: Mapping[str, Any]) -> frozenset[str]:
    """Return the features `on_hardware` whose ids must be unchanged arguments of the step: all of them, before SparseCores."""
    if not on_hardware or embedding_feature(tf.distribute.get_strategy()) != "V1":
        return frozenset()
    return frozenset(on_hardware)


def _check_features(configs: Mapping[str, FeatureConfig], optimizer: Any) -> None:
    """Raise ConfigError if there are none, a table has no optimizer, or two different tables have one name."""
    if not configs:
        raise ConfigError("DistributedEmbedding: feature_configs is empty. Name at least one feature.")
    tables: dict[str, TableConfig] = {}
    for config in configs.values():
        if optimizer is None and config.table.optimizer is None:
            raise ConfigError(
                f"table {config.table.name!r}: neither it nor the layer has an optimizer. Give one of them an optimizer."
            )
        if tables.setdefault(config.table.name, config.table) != config.table:
            raise ConfigError(
                f"two different tables are called {config.table.name!r}. They differ in "
                f"{differing(tables[config.table.name], config.table)}. Rename one."
            )


def _layer_features(features: Mapping[str, Any], shape: Any) -> dict[str, Any]:
    """Return the features as tpuembed's configs, with `shape(config)` as output_shape. Tables stay shared."""
    tables = {id(config.table): config.table.to_layer() for config in features.values()}
    return {
        path: LayerFeature(tables[id(config.table)], name=config.name, output_shape=shape(config))
        for path, config in features.items()
    }


def _per_replica_shape(config: FeatureConfig) -> tuple[int | None, ...]:
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    batch, *others = config.output_shape[:-1]
    if batch is not None and batch % replicas:
        raise ConfigError(
            f"feature {config.name!r}: output_shape {config.output_shape} has the batch of all {replicas} replicas. {batch} "
            f"examples cannot be divided among them. Make the batch a multiple of {replicas}."
        )
    return (None if batch is None else batch // replicas, *others)


def _features_from(node: Any, tables: list[TableConfig]) -> Any:
    """Return the structure of FeatureConfig that `get_config` wrote."""
    if isinstance(node, Mapping) and isinstance(node.get("table"), int):
        return FeatureConfig(**{**node, "table": tables[node["table"]]})
    if isinstance(node, Mapping):
        return {key: _features_from(child, tables) for key, child in node.items()}
    return [_features_from(child, tables) for child in node]


# ---- ids and weights: keras-rs combines dense ids [batch, ids], `TPUEmbedding` only sparse and ragged ones


def _prepare(config: FeatureConfig, ids: Tensor, weights: Tensor, unchanged: bool = False) -> tuple[Tensor, Tensor]:
    """Return (ids, weights) of one feature for `TPUEmbedding`. Weights may be None.

    Args:
        config: the feature's config.
        ids, weights: the feature's arguments of `call`.
        unchanged: True if the hardware takes only the unchanged arguments of a step.

    Raises:
        ConfigError: the shape of ids or weights differs from the config's, or they would have to be changed. The
            message names the feature.
    """
    kind = kind_of(ids)
    ids = ids if kind.is_combined else tf.convert_to_tensor(ids)
    _check_shape(config, kind, ids)
    convert = _conversion(config, kind, ids, weights)
    if convert is None:
        return ids, weights
    if unchanged:
        raise ConfigError(
            f"feature {config.name!r}: TPUs v2 to v4 take ids as they come from the input pipeline. In the pipeline, convert dense "
            "[batch, ids] to a tf.RaggedTensor and cut longer examples. Then set input_shape (batch, None)."
        )
    if tpu_call() is None:
        return convert(config, ids, weights)
    return tf.compat.v1.tpu.outside_compilation(convert, config, ids, weights)  # embedding ids stay on the host


def _conversion(
    config: FeatureConfig, kind: type[Ids], ids: Tensor, weights: Tensor
) -> Callable[[FeatureConfig, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Return the function that converts ids and weights of a kind. Returns None if they stay as they are."""
    if kind is RaggedIds:
        return None if _limit(config) is None else _cut
    is_ready = kind is SparseIds or not (_lacks_an_axis(config, ids) or config.combined or weights is not None)
    return None if is_ready else _from_dense


def _cut(config: FeatureConfig, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    limit = _limit(config)
    return ids[:, :limit], None if weights is None else weights[:, :limit]


def _from_dense(config: FeatureConfig, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    if _lacks_an_axis(config, ids):
        weights = None if weights is None else _like(config, ids, weights)[:, None]
        ids = ids[:, None]
    if config.combined:
        return _as_ragged(ids), None if weights is None else _as_ragged(_like(config, ids, weights))
    if ids.shape.rank == 1 and config.table.combiner == "sum":  # other combiners return the row itself for any weight
        return _as_ragged(ids[:, None]), _as_ragged(_like(config, ids, weights)[:, None])
    return ids, None if ids.shape.rank == 1 else weights


def _as_ragged(values: Tensor) -> Tensor:
    """Return [batch, n] as ragged rows of n each. Known sizes stay known, because a TPU program needs them."""
    rows, length = (
        known if known is not None else tf.shape(values, tf.int64)[axis] for axis, known in enumerate(values.shape)
    )
    return tf.RaggedTensor.from_uniform_row_length(tf.reshape(values, [-1]), length, nrows=rows)


def _limit(config: FeatureConfig) -> int | None:
    return config.input_shape[1] if len(config.input_shape) == 2 else None


def _lacks_an_axis(config: FeatureConfig, ids: Tensor) -> bool:
    """Return True if dense ids [batch] are given for an input_shape (batch, 1)."""
    return ids.shape.rank == 1 and len(config.input_shape) == 2 and config.input_shape[1] == 1


def _check_shape(config: FeatureConfig, kind: type[Ids], ids: Tensor) -> None:
    """Raise ConfigError if `ids` do not match input_shape. The batch may differ, ids [batch] count as [batch, 1],
    sparse ids may be narrower."""
    shape, wanted = tuple(ids.shape), config.input_shape
    if _lacks_an_axis(config, ids):
        return
    sizes = () if kind is RaggedIds else tuple(zip(shape[1:], wanted[1:], strict=False))
    is_sparse = kind is SparseIds
    wrong = [pair for pair in sizes if None not in pair and (pair[0] > pair[1] if is_sparse else pair[0] != pair[1])]
    if len(shape) != len(wanted) or wrong:
        raise ConfigError(
            f"feature {config.name!r}: its ids have shape {shape}. Its input_shape is {wanted}. Make all sizes but the batch equal."
        )


def _like(config: FeatureConfig, ids: Tensor, weights: Tensor) -> Tensor:
    weights = tf.convert_to_tensor(weights)
    if not weights.shape.is_compatible_with(ids.shape):
        raise ConfigError(
            f"feature {config.name!r}: weights have shape {tuple(weights.shape)}, ids {tuple(ids.shape)}. Make them equal."
        )
    return weights


layers = module(
    f"{__name__}.layers",
    DistributedEmbedding=DistributedEmbedding,
    FeatureConfig=FeatureConfig,
    TableConfig=TableConfig,
)
