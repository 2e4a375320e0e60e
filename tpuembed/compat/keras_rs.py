"""keras-rs' embedding layer: `import keras_rs` becomes `from tpuembed.compat import keras_rs`.

`keras_rs.layers.DistributedEmbedding` and its configs are there by that name, and without `layers`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tpuembed.backends.feature_input import as_tensors
from tpuembed.backends.tf_config import optimizer_to_dict, resolve_optimizer
from tpuembed.backends.tf_tpu import embedding_feature, is_tpu_strategy
from tpuembed.compat import module
from tpuembed.compat.divided import DividedEmbedding, divide
from tpuembed.compat.keras_rs_config import FeatureConfig, TableConfig
from tpuembed.compat.keras_rs_inputs import prepare
from tpuembed.config import FeatureConfig as LayerFeature
from tpuembed.config.structure import check_plain, flatten, map_leaves
from tpuembed.errors import ConfigError
from tpuembed.layer import TPUEmbedding
from tpuembed.runtime.table_scope import current_source

__all__ = ["DistributedEmbedding", "FeatureConfig", "TableConfig", "layers"]

_PREPROCESSED = "preprocessed_inputs_per_placement"
_SPARSECORE, _DEFAULT = "sparsecore", "default_device"


@keras.saving.register_keras_serializable(package="tpuembed.compat.keras_rs")
class DistributedEmbedding(DividedEmbedding):
    """Looks features up in tables, each placed on the TPU's embedding hardware or beside the rest of the model.

    Every table is trained by its own optimizer, wherever it is placed; the optimizer of `compile` trains the rest. Dense ids
    of [batch, ids] are combined, as sparse and ragged ones are. An export finds the tables whatever their placement.

    Args:
        feature_configs: a nested structure of FeatureConfig, or of `tf.tpu.experimental.embedding.FeatureConfig`, whose
            tables are placed as "auto".
        table_stacking: "auto", or None to keep every table by itself; only SparseCores stack tables.
        update_stats: only False.
        optimizer: for tables without their own.
        pipeline_execution_with_tensor_core: overlap lookups with dense computation.
        sparse_core_embedding_config: TensorFlow's, with TensorFlow's feature configs.
        **kwargs: as for every Keras layer.

    Raises:
        ConfigError: a config that cannot be honoured, by name.

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
        _check_options(table_stacking, update_stats)
        self._options = _Options(
            table_stacking,
            None if optimizer is None else resolve_optimizer(optimizer),
            pipeline_execution_with_tensor_core,
            sparse_core_embedding_config,
        )
        ours = _is_ours(feature_configs)
        _check_config_kind(ours, self._options)
        division = divide(feature_configs, lambda config: _place(config, ours))
        configs = dict(flatten(feature_configs))
        _check_optimizers(configs, optimizer)
        _check_names(configs if ours else {})
        parts = {place: division.part(place, configs) for place in (_SPARSECORE, _DEFAULT)}
        makers = {_SPARSECORE: self._on_hardware, _DEFAULT: self._on_default_device}
        self._set_parts(division, {place: makers[place](part) for place, part in parts.items() if part})
        self._configs = _Configs(configs, ours, _unchangeable(parts[_SPARSECORE]))

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
        """`inputs` and `weights` together, by placement, as `call` also takes them; optional.

        Raises:
            ConfigError: their structure is not that of `feature_configs`.
        """
        division = self._division.value
        given = {"inputs": division.unpack(as_tensors(division.structure, inputs, "inputs"), "inputs")}
        if weights is not None:
            given["weights"] = division.unpack(as_tensors(division.structure, weights, "weights"), "weights")
        return {
            _PREPROCESSED: {
                place: {what: division.part(place, leaves) for what, leaves in given.items()} for place in self._places
            }
        }

    @tf.autograph.experimental.do_not_convert
    def __call__(self, inputs: Any, weights: Any = None, **kwargs: Any) -> Any:
        """`call`, as Keras calls it; ids and weights may also be numbers of Python and lists of them."""
        if isinstance(inputs, Mapping) and _PREPROCESSED in inputs:
            return super().__call__(inputs, *(() if weights is None else (weights,)), **kwargs)
        structure = self._division.value.structure
        given = () if weights is None else (as_tensors(structure, weights, "weights"),)
        return super().__call__(as_tensors(structure, inputs, "inputs"), *given, **kwargs)

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs: Any, weights: Any = None, training: bool = False) -> Any:
        """The structure of `feature_configs` with activations at its leaves.

        Args:
            inputs: that structure with ids at its leaves, or what `preprocess` gave.
            weights: None, or the same structure with weights of the ids' kind and shape.
            training: has no effect: tables are trained where a gradient is taken.
        """
        ids, given = self._leaves(inputs, weights, training)
        pairs = {path: self._configs.prepare(path, ids[path], None if given is None else given[path]) for path in ids}
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
        """The symbolic activations of symbolic `inputs`."""
        ids, _ = self._leaves(inputs, weights, training)
        if not self._configs.ours:
            return self._specs(ids)
        specs = {
            path: keras.KerasTensor(self._configs.output_shape(path, ids[path].shape[0]), self.compute_dtype)
            for path in ids
        }
        return self._division.value.pack(specs)

    def compute_output_shape(self, input_shapes: Any) -> Any:  # noqa: ARG002 - the configs say it
        """The output_shape of every feature, with the batch of all replicas."""
        if not self._configs.ours:
            raise ConfigError(
                f"layer {self.name!r}: TensorFlow's feature configs do not tell the shape of their outputs"
            )
        return map_leaves(lambda config: config.output_shape, self._division.value.structure)

    # ---- tables

    def get_embedding_tables(self) -> dict[str, Any]:
        """{table name: numpy float32 [vocabulary_size, dim]}, wherever the tables are."""
        return {name: variable.numpy() for name, variable in self.table_variables().items()}

    def set_embedding_tables(self, tables: Mapping[str, Any]) -> None:
        """Overwrite tables; those that are not named stay as they are, and so do slots.

        Args:
            tables: {table name: float32 [vocabulary_size, dim]}.

        Raises:
            UnknownTableError: the layer has no such table.
            ConfigError: another shape or dtype than the table's.
        """
        homes = {name: self._home(name) for name in tables}
        for name, values in tables.items():
            homes[name].update_embedding_table(name, values)

    # ---- saving

    def get_config(self) -> dict[str, Any]:
        """Everything but the weights. A table that features share stands once, under `tables`."""
        if not self._configs.ours:
            raise ConfigError(
                f"layer {self.name!r}: TensorFlow's feature configs cannot be written; use tpuembed.compat.keras_rs.FeatureConfig"
            )
        structure = self._division.value.structure
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
        """The layer that `get_config` described."""
        rest = dict(config)
        tables = [TableConfig.from_config(table) for table in rest.pop("tables")]
        return cls(_features_from(rest.pop("feature_configs"), tables), **rest)


@dataclasses.dataclass(frozen=True)
class _Options:
    """What the layer was asked for besides its features."""

    table_stacking: Any
    optimizer: Any
    pipelining: bool
    sparse_core_config: Any

    def sparse_core(self) -> Any:
        """TensorFlow's config of SparseCores; None for its defaults."""
        if self.table_stacking is None and embedding_feature(tf.distribute.get_strategy()) == "V2":
            return tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig(disable_table_stacking=True)
        return self.sparse_core_config

    def to_dict(self) -> dict[str, Any]:
        return {
            "table_stacking": self.table_stacking,
            "optimizer": None if self.optimizer is None else optimizer_to_dict(self.optimizer),
            "pipeline_execution_with_tensor_core": self.pipelining,
        }


@dataclasses.dataclass(frozen=True)
class _Configs:
    """The features by path; `ours` where they are this module's; those whose ids the hardware takes `unchanged`."""

    features: Mapping[str, Any]
    ours: bool
    unchanged: frozenset[str]

    def prepare(self, path: str, ids: Any, weights: Any) -> tuple[Any, Any]:
        if not self.ours:
            return ids, weights
        return prepare(self.features[path], ids, weights, path in self.unchanged)

    def output_shape(self, path: str, batch: int | None) -> tuple[int | None, ...]:
        return (batch, *self.features[path].output_shape[1:])


def _check_options(table_stacking: Any, update_stats: bool) -> None:
    if update_stats:
        raise ConfigError(
            "DistributedEmbedding: update_stats=True needs keras-rs on JAX; `tpuembed doctor` counts a sample"
        )
    if table_stacking not in ("auto", None):
        raise ConfigError(
            f"DistributedEmbedding: table_stacking={table_stacking!r}: TensorFlow stacks tables by itself; pass 'auto', or "
            "None to stack none"
        )


def _is_ours(structure: Any) -> bool:
    """Whether the features are this module's; TensorFlow's otherwise."""
    leaves = [leaf for _, leaf in flatten(structure)]
    ours = [isinstance(leaf, FeatureConfig) for leaf in leaves]
    if not leaves:
        raise ConfigError("DistributedEmbedding: feature_configs is empty; name at least one feature")
    if any(ours) and not all(ours):
        raise ConfigError(
            "DistributedEmbedding: feature_configs mixes tpuembed.compat.keras_rs.FeatureConfig with "
            f"{type(leaves[ours.index(False)]).__name__}; use one kind"
        )
    return any(ours)


def _check_config_kind(ours: bool, options: _Options) -> None:
    if ours and options.sparse_core_config is not None:
        raise ConfigError(
            "DistributedEmbedding: sparse_core_embedding_config goes with TensorFlow's feature configs; here a TableConfig has "
            "max_ids_per_partition and max_unique_ids_per_partition, and the layer table_stacking"
        )
    if not ours and options.table_stacking != "auto":
        raise ConfigError(
            "DistributedEmbedding: table_stacking goes with tpuembed.compat.keras_rs.FeatureConfig; with TensorFlow's, set "
            "disable_table_stacking of its SparseCoreEmbeddingConfig"
        )


def _place(config: Any, ours: bool) -> str:
    """Where the feature's table goes. An export takes the rows from a checkpoint, so there no hardware is asked for."""
    wanted = config.table.placement if ours else "auto"
    if wanted == _DEFAULT or current_source() is not None:
        return _DEFAULT
    strategy = tf.distribute.get_strategy()
    found = is_tpu_strategy(strategy) and embedding_feature(strategy) in ("V1", "V2")
    if wanted == _SPARSECORE and not found:
        raise ConfigError(
            f"table {config.table.name!r}: placement 'sparsecore' needs a TPUStrategy over TPUs with embedding hardware, and the "
            f"layer is created under {type(strategy).__name__}; use 'auto' to place it there only where it is"
        )
    return _SPARSECORE if found else _DEFAULT


def _unchangeable(on_hardware: Mapping[str, Any]) -> frozenset[str]:
    """Those of the features `on_hardware` whose ids must be arguments of the step: all, before SparseCores."""
    if not on_hardware or embedding_feature(tf.distribute.get_strategy()) != "V1":
        return frozenset()
    return frozenset(on_hardware)


def _check_optimizers(configs: Mapping[str, Any], optimizer: Any) -> None:
    for config in configs.values():
        if optimizer is None and getattr(config, "table", None) is not None and config.table.optimizer is None:
            raise ConfigError(
                f"table {config.table.name!r}: neither it nor the layer has an optimizer; give one of them one"
            )


def _check_names(configs: Mapping[str, FeatureConfig]) -> None:
    """Raise ConfigError where two tables have one name; a table of TensorFlow's may have none."""
    tables: dict[str, TableConfig] = {}
    for config in configs.values():
        if tables.setdefault(config.table.name, config.table) != config.table:
            raise ConfigError(
                f"two different tables are called {config.table.name!r}: {tables[config.table.name]} and {config.table}; "
                "rename one"
            )


def _layer_features(features: Mapping[str, Any], shape: Any) -> dict[str, Any]:
    """The features in tpuembed's words, with `shape(config)` for output_shape; tables stay shared."""
    if not all(isinstance(config, FeatureConfig) for config in features.values()):
        return dict(features)
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
            f"feature {config.name!r}: output_shape {config.output_shape} has the batch of all {replicas} replicas, and {batch} "
            "cannot be divided among them; make it a multiple"
        )
    return (None if batch is None else batch // replicas, *others)


def _features_from(node: Any, tables: list[TableConfig]) -> Any:
    """The structure of FeatureConfig that `get_config` wrote."""
    if isinstance(node, Mapping) and isinstance(node.get("table"), int):
        return FeatureConfig(**{**node, "table": tables[node["table"]]})
    if isinstance(node, Mapping):
        return {key: _features_from(child, tables) for key, child in node.items()}
    return [_features_from(child, tables) for child in node]


layers = module(
    f"{__name__}.layers",
    DistributedEmbedding=DistributedEmbedding,
    FeatureConfig=FeatureConfig,
    TableConfig=TableConfig,
)
