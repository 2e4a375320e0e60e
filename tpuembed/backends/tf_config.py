"""Conversion of configs to and from TensorFlow's and Keras' own objects. Only this backend module uses their private names."""

import dataclasses
import logging
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import tpu_util
from tensorflow.python.framework import ops
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.ops import control_flow_util
from tensorflow.python.saved_model.save_context import in_save_context

from tpuembed.config import (
    FTRL,
    OPTIMIZERS,
    SGD,
    Adagrad,
    Adam,
    FeatureConfig,
    Optimizer,
    QuantizationConfig,
    TableConfig,
    feature_config_to_dict,
    optimizer_from,
)
from tpuembed.config.checks import differing
from tpuembed.config.structure import check_plain, flatten, pack_like
from tpuembed.errors import ConfigError, warn

__all__ = [
    "LiveRate",
    "SavedNode",
    "Trackable",
    "custom_gradient",
    "features_from",
    "features_to_dict",
    "features_to_tf",
    "in_save_context",
    "in_xla_context",
    "is_op_determinism_enabled",
    "local",
    "loss_scale",
    "optimizer_to_dict",
    "optimizer_to_tf",
    "resolve_optimizer",
    "restores_so_far",
    "sparse_core_config_from_dict",
    "sparse_core_config_to_dict",
    "unchecked_gathers",
]

_embedding = tf.tpu.experimental.embedding
Trackable: Any = tf.__internal__.tracking.Trackable


class SavedNode(Trackable):
    """A checkpoint node with values of its own, which `_serialize_to_tensors` returns.

    An asynchronous save copies all variables, and writes the copies while training goes on. So it copies these values
    too. Otherwise a checkpoint would have the rows of one step, and the count of updates of a later one.
    """

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        """Copy the values into the copy of this node in `object_map`. TensorFlow traces this once and then runs the graph."""
        values = self._serialize_to_tensors()
        if self not in object_map:
            object_map[self] = _Copy(values)
        for name, value in values.items():
            object_map[self].variables[name].assign(value)


class _Copy(Trackable):
    """What a SavedNode had when an asynchronous save began."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        with tf.device("CPU:0"):
            self.variables = {
                name: tf.Variable(value, trainable=False, shape=[None] * len(value.shape))
                for name, value in values.items()
            }

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {name: variable.read_value() for name, variable in self.variables.items()}

    def _restore_from_tensors(self, restored: Mapping[str, Any]) -> Any:
        raise NotImplementedError  # a restore is of the node itself


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `tf.custom_gradient(function)`, whose gradient is freed with the graph into which a call was traced.

    TensorFlow registers each traced gradient until the process ends. The gradient holds the graph and what `function` uses,
    so every dropped model would keep its tables. See https://github.com/tensorflow/tensorflow/issues/97697.
    """
    decorated = tf.custom_gradient(function)

    def call(*args: Any) -> Any:
        results = decorated(*args)
        if not tf.executing_eagerly():
            _free_with_graph(tf.nest.flatten(results)[0].op)
        return results

    return call


def _free_with_graph(operation: Any) -> None:
    """Make the graph of `operation` the only owner of the gradient that TensorFlow registered for it."""
    registry, graph = ops.gradient_registry._registry, operation.graph
    name = operation.get_attr("_gradient_op_type").decode()
    gradient = registry[name]["type"]
    graph._tpuembed_gradients = [*getattr(graph, "_tpuembed_gradients", ()), gradient]
    found = weakref.ref(gradient)
    registry[name]["type"] = lambda *arguments: found()(*arguments)  # type: ignore[misc]
    weakref.finalize(graph, registry.pop, name).atexit = False


def restores_so_far() -> int:
    """Return a number above that of each restore until now, and below that of each later one."""
    number: int = ops.uid()
    return number


def in_xla_context() -> bool:
    """Return True if XLA will compile the ops that are being built."""
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def unchecked_gathers() -> bool:
    """Return True if a gather outside the table does not fail: XLA clamps the id, a GPU returns zeros."""
    return in_xla_context() or bool(tf.config.get_visible_devices("GPU"))


def loss_scale(optimizer: Any) -> Any:
    """Return the factor that `optimizer` multiplied this step's loss with, or None."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        scale = optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
        return tf.cast(tf.convert_to_tensor(scale), tf.float32)
    return getattr(optimizer, "loss_scale_factor", None)


def local(variable: Any) -> Any:
    """Return the running replica's copy of a mirrored variable. Outside of replicas, return the first copy."""
    if not hasattr(variable, "_values") or tpu_util.enclosing_tpu_context() is not None:
        return variable  # in a TPU program, the mirrored variable itself stands for its TPU's copy
    return variable._primary if tf.distribute.in_cross_replica_context() else variable._get()


# ---- features and tables


def features_from(structure: Any, served: Mapping[Any, str] | None = None) -> tuple[Any, dict[Any, str]]:
    """Convert a nested structure of FeatureConfig, tpuembed's or TensorFlow's, to tpuembed's.

    Args:
        structure: the structure that the user passed.
        served: {TableConfig as it was passed: table name} of the layer, if `structure` is a serving_config. There, a
            TensorFlow table without a name must be the layer's own object.

    Returns:
        (the structure with tpuembed's FeatureConfig at its leaves, {TableConfig as the caller passed it: table name}).
            A TensorFlow table without a name gets TensorFlow's own, `table_<i>` by order of first use, and a warning.

    Raises:
        ConfigError: a leaf is not a FeatureConfig, two TableConfigs share a name (in a serving_config, equal ones may),
            or a table of a serving_config has no name.
    """
    leaves = list(flatten(structure))
    if not leaves:
        raise ConfigError("feature_config is empty. Name at least one feature.")
    tables: dict[int, tuple[Any, TableConfig]] = {}
    features = [_feature_from(path, leaf, tables, served) for path, leaf in leaves]
    _check_names([table for _, table in tables.values()], equal_allowed=served is not None)
    return pack_like(structure, features), {original: table.name for original, table in tables.values()}


def _feature_from(
    path: str, leaf: Any, tables: dict[int, tuple[Any, TableConfig]], served: Mapping[Any, str] | None
) -> FeatureConfig:
    if not isinstance(leaf, FeatureConfig | _embedding.FeatureConfig):
        raise ConfigError(f"feature {path!r}: expected a FeatureConfig, got {leaf!r}.")
    if id(leaf.table) not in tables:
        tables[id(leaf.table)] = (leaf.table, _table_from(path, leaf.table, len(tables), served))
    table = tables[id(leaf.table)][1]
    if isinstance(leaf, FeatureConfig):
        return leaf
    shape = tf.TensorShape(leaf.output_shape)
    return FeatureConfig(
        table=table,
        name=leaf.name,
        max_sequence_length=leaf.max_sequence_length or 0,
        output_shape=None if shape.rank is None else tuple(shape),
        validate_weights_and_indices=leaf.validate_weights_and_indices,
    )


def _table_name(path: str, table: Any, index: int, served: Mapping[Any, str] | None) -> str:
    """Return the name of TensorFlow's `table`. Without one, return TensorFlow's own, by order of first use in the
    layer's features."""
    if table.name is not None:
        return str(table.name)
    if served is not None:
        if table not in served:
            raise ConfigError(
                f"serving_config feature {path!r}: its TableConfig has no name and is not one that the layer was built with. "
                f"Name one of the layer's tables: {', '.join(sorted(served.values()))}."
            )
        return served[table]
    name = f"table_{index}"
    warn(
        f"a TableConfig without a name is called {name!r}, by its place among the features. Adding a feature that sorts "
        "earlier would rename it, and checkpoints use that name as a key. Give it a name.",
    )
    return name


def _table_from(path: str, table: Any, index: int, served: Mapping[Any, str] | None) -> TableConfig:
    if isinstance(table, TableConfig):
        return table
    name = _table_name(path, table, index, served)
    if getattr(table, "dtype", tf.float32) != tf.float32:
        raise ConfigError(f"table {name!r}: dtype {table.dtype.name} is not supported. Tables train in float32.")
    if getattr(table, "layout", None) is not None:
        raise ConfigError(f"table {name!r}: layout cannot be set, because the hardware determines it. Drop it.")
    quantization = table.quantization_config
    if quantization is not None:
        quantization = QuantizationConfig(quantization.num_buckets, quantization.lower, quantization.upper)
    return TableConfig(
        vocabulary_size=table.vocabulary_size,
        dim=table.dim,
        name=name,
        combiner=table.combiner,
        initializer=_unless_default(table.initializer, table.dim),
        optimizer=table.optimizer,
        quantization_config=quantization,
    )


def _unless_default(initializer: Any, dim: int) -> Any:
    """Return None for TensorFlow's default initializer, which is also tpuembed's default."""
    config = initializer.get_config() if hasattr(initializer, "get_config") else {}
    default = {"mean": 0.0, "stddev": 1.0 / math.sqrt(dim), "seed": None}
    is_default = type(initializer).__name__ == "TruncatedNormal" and default.items() <= config.items()
    return None if is_default else initializer


def _check_names(tables: list[TableConfig], equal_allowed: bool) -> None:
    by_name: dict[str, TableConfig] = {}
    for table in tables:
        other = by_name.setdefault(table.name, table)
        if other != table:
            raise ConfigError(
                f"two different tables are called {table.name!r}. They differ in {differing(other, table)}. Rename one."
            )
        if other is not table and not equal_allowed:
            raise ConfigError(
                f"two tables are called {table.name!r}: several features have their own TableConfig of that name. Give them the "
                "same object to share its rows, or rename one."
            )


_OWN_FIELDS = ("out_of_vocabulary", "vocabulary", "oov_buckets")
"""The fields of a FeatureConfig that TensorFlow's has not."""


def features_to_tf(structure: Any) -> Any:
    """Convert a nested structure of tpuembed's FeatureConfig to `tf.tpu.experimental.embedding` objects. Shared tables
    stay shared."""
    tables: dict[str, Any] = {}
    out = []
    for _, feature in flatten(structure):
        if feature.table.name not in tables:
            tables[feature.table.name] = _table_to_tf(feature.table)
        names = [field.name for field in dataclasses.fields(feature)[1:] if field.name not in _OWN_FIELDS]
        fields = {name: getattr(feature, name) for name in names}
        out.append(_embedding.FeatureConfig(table=tables[feature.table.name], **fields))
    return pack_like(structure, out)


def _table_to_tf(table: TableConfig) -> Any:
    quantization = table.quantization_config
    initializer = table.initializer
    if isinstance(initializer, str | Mapping):
        initializer = keras.initializers.get(initializer)
    return _embedding.TableConfig(
        vocabulary_size=table.vocabulary_size,
        dim=table.dim,
        initializer=initializer,
        optimizer=None if table.optimizer is None else optimizer_to_tf(resolve_optimizer(table.optimizer)),
        combiner=table.combiner,
        name=table.name,
        quantization_config=quantization and _embedding.QuantizationConfig(**dataclasses.asdict(quantization)),
    )


def features_to_dict(structure: Any, for_checkpoint: bool = False) -> dict[str, Any]:
    """Return `feature_config_to_dict` of features whose tables hold Keras or TensorFlow objects.

    Args:
        structure: nested structure of tpuembed's FeatureConfig.
        for_checkpoint: leave out initializers and optimizers, which reading a checkpoint does not need.

    Raises:
        ConfigError: an initializer exists only as Python code, or JSON would change the structure.
    """
    if not for_checkpoint:
        check_plain(structure)
    leaves = [feature for _, feature in flatten(structure)]
    tables = {feature.table.name: feature.table for feature in leaves}
    plain = {name: _plain_table(table, for_checkpoint) for name, table in tables.items()}
    features = [dataclasses.replace(feature, table=plain[feature.table.name]) for feature in leaves]
    return feature_config_to_dict(pack_like(structure, features))


def _plain_table(table: TableConfig, for_checkpoint: bool) -> TableConfig:
    if for_checkpoint:
        return dataclasses.replace(table, initializer=None, optimizer=None)
    optimizer = None if table.optimizer is None else optimizer_to_dict(resolve_optimizer(table.optimizer))
    return dataclasses.replace(table, initializer=_plain_initializer(table), optimizer=optimizer)


def _plain_initializer(table: TableConfig) -> Any:
    """Return a Keras initializer's dict. TensorFlow's own initializers have the same names and arguments.

    Constants differ: TensorFlow fills the table with the values in order, Keras broadcasts them.
    """
    value = table.initializer
    if type(value).__module__.endswith("init_ops_v2"):
        config = {key: item for key, item in value.get_config().items() if key != "dtype"}
        if "value" not in config:
            return {"class_name": type(value).__name__, "config": config}
        values = np.asarray(config["value"])
        laid_out = values.reshape(table.vocabulary_size, table.dim) if values.size > 1 else values.reshape(())
        value = keras.initializers.Constant(laid_out.astype(np.float32))
    return keras.initializers.serialize(value) if isinstance(value, keras.initializers.Initializer) else value


def sparse_core_config_to_dict(config: Any) -> dict[str, Any] | None:
    """Return a `SparseCoreEmbeddingConfig` as JSON values."""
    return None if config is None else dataclasses.asdict(config)


def sparse_core_config_from_dict(value: Mapping[str, Any] | None) -> Any:
    """Return the `SparseCoreEmbeddingConfig` that `sparse_core_config_to_dict` wrote."""
    return None if value is None else _embedding.SparseCoreEmbeddingConfig(**value)


# ---- optimizers

_TF_CLASSES: Mapping[type[Optimizer], Any] = {spec: getattr(_embedding, spec.__name__) for spec in OPTIMIZERS.values()}
_OF_FTRL = ("learning_rate_power", "l1_regularization_strength", "l2_regularization_strength", "beta")
# Keras 3 class -> the spec, and the hyper-parameters that both have, besides the learning rate and clipvalue.
_LOG = logging.getLogger(__name__)
_KERAS_CLASSES: Mapping[str, tuple[type[Optimizer], tuple[str, ...]]] = {
    "SGD": (SGD, ()),
    "Adagrad": (Adagrad, ("initial_accumulator_value",)),
    "Adam": (Adam, ("beta_1", "beta_2", "epsilon")),
    "Ftrl": (FTRL, (*_OF_FTRL, "initial_accumulator_value")),
}
# Options that a row-wise rule does not support, or that Keras applies to every row.
_KERAS_REFUSED = (
    "weight_decay",
    "clipnorm",
    "global_clipnorm",
    "use_ema",
    "loss_scale_factor",
    "gradient_accumulation_steps",
    "momentum",
    "nesterov",
    "amsgrad",
    "l2_shrinkage_regularization_strength",
)
_KERAS_ADAGRAD_EPSILON = 1e-7  # Keras' default; the TPU rule has no epsilon


def resolve_optimizer(value: Any) -> Optimizer:
    """Return a table optimizer, given in any form, as tpuembed's spec.

    Args:
        value: a name, a dict, a tpuembed spec, a `tf.tpu.experimental.embedding` optimizer, or a Keras 3 SGD, Adagrad,
            Adam or Ftrl. The learning rate of a Keras optimizer stays live: the spec reads it at every update.

    Raises:
        ConfigError: the tables do not support the optimizer or a hyper-parameter. The message names it.
    """
    if isinstance(value, str | Mapping | Optimizer):
        return optimizer_from(_with_live_schedule(value))
    for spec_class, tf_class in _TF_CLASSES.items():
        if type(value) is tf_class:
            return _from_tf(spec_class, value)
    if isinstance(value, keras.optimizers.Optimizer):
        return _from_keras(value)
    remedy = "Pass a name such as adagrad, a tpuembed spec, a tf.tpu.experimental.embedding or a Keras 3 optimizer."
    if type(value).__module__.split(".")[0] == "tf_keras":
        remedy = "tf_keras optimizers work on Keras 2 only. Pass the Keras 3 one."
    raise ConfigError(f"table optimizer {type(value).__name__}: not supported. {remedy}")


def _from_tf(spec_class: type[Optimizer], value: Any) -> Optimizer:
    if value.low_dimensional_packing_status:
        raise ConfigError(f"{type(value).__name__}: low_dimensional_packing_status is not supported. Leave it False.")
    names = [field.name for field in dataclasses.fields(spec_class) if field.name != "clipvalue"]
    fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
    bounds = (value.clip_gradient_min, value.clip_gradient_max)
    return spec_class(**fields, clipvalue=None if bounds == (None, None) else bounds)


def optimizer_to_dict(spec: Optimizer) -> dict[str, Any]:
    """Return the spec as JSON values. A schedule is written as Keras writes it, another live learning rate as its current value."""
    out = spec.static_dict()
    if isinstance(spec.learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        out["learning_rate"] = {"schedule": keras.optimizers.schedules.serialize(spec.learning_rate)}
    elif callable(spec.learning_rate):
        out["learning_rate"] = float(tf.convert_to_tensor(spec.learning_rate()))
    return out


def _with_live_schedule(value: Any) -> Any:
    """Return a dict of `optimizer_to_dict` with its schedule converted back to an object."""
    rate = value.get("learning_rate") if isinstance(value, Mapping) else None
    if not isinstance(rate, Mapping) or "schedule" not in rate:
        return value
    return {**value, "learning_rate": keras.optimizers.schedules.deserialize(rate["schedule"])}


def optimizer_to_tf(spec: Optimizer) -> Any:
    """Convert the spec to the `tf.tpu.experimental.embedding` optimizer with the same rule.

    Raises:
        ConfigError: no accelerator supports it (FTRL with an initial accumulator of zero).
    """
    if type(spec) not in _TF_CLASSES:
        raise ConfigError(
            f"optimizer {spec.kind}: TensorFlow's embedding accelerators have none of this kind. Choose another."
        )
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    if isinstance(spec, SGD):
        del fields["slot_variable_creation_fn"]  # TensorFlow's SGD has no slots
    try:
        optimizer = _TF_CLASSES[type(spec)](**fields)
    except ValueError as error:
        raise ConfigError(
            f"optimizer {spec.kind}: embedding accelerators do not support it. TensorFlow: {str(error).rstrip('.')}. Change the "
            "value, or set size_threshold to replicate the table."
        ) from None
    optimizer.low_dimensional_packing_status = 0  # TensorFlow's False is not the enum that its own proto takes
    return optimizer


@dataclasses.dataclass(frozen=True, eq=False)
class LiveRate:
    """The learning rate of a Keras optimizer, read when an update runs."""

    optimizer: Any

    def __call__(self) -> Any:
        """Return the current rate."""
        return self.optimizer.learning_rate


def _from_keras(value: Any) -> Optimizer:
    kind = type(value).__name__
    if kind not in _KERAS_CLASSES:
        raise ConfigError(f"Keras optimizer {kind}: not supported. Pass one of {', '.join(_KERAS_CLASSES)}.")
    for name in _KERAS_REFUSED:
        given = getattr(value, name, None)
        if given:
            raise ConfigError(f"Keras {kind}: {name}={given!r} cannot be applied to table rows. Leave it unset.")
    if kind == "Adagrad" and value.epsilon != _KERAS_ADAGRAD_EPSILON:
        raise ConfigError(
            f"Keras Adagrad: epsilon={value.epsilon!r} is not supported, because the table rule has none. Leave the default."
        )
    rate = value._learning_rate
    if not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        rate = LiveRate(value)
    if kind == "Adam":
        _LOG.warning("Keras' Adam corrects the bias of its first steps; the tables' Adam does not, as on TPUs.")
    spec_class, names = _KERAS_CLASSES[kind]
    return spec_class(learning_rate=rate, clipvalue=value.clipvalue, **{name: getattr(value, name) for name in names})
