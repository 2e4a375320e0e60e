"""What every field of the configuration must say, for a model: written from TensorFlow's protos, apart from the layer.

Sources: tpu_embedding_configuration.proto and optimization_parameters.proto in tensorflow/core/protobuf/tpu, and
tensorflow/core/tpu/tpu_embedding_configuration_proto_rewrite.cc, which checks and completes a configuration.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from tests.tpu.v1.models import Model
from tpuembed import TableConfig
from tpuembed.config import FTRL, SGD, Adagrad, AdagradMomentum, Adam, Optimizer, optimizer_from

__all__ = ["FEATURE", "MODEL", "TABLE", "UNSET", "Field", "completed", "differences", "optimizer_of"]

UNSET: Final = object()
"""The field must not be there."""
_DEFAULT: Final = object()
"""A number, text or flag that is 0, empty or False, which in these protos is the same as not there."""


@dataclasses.dataclass(frozen=True)
class Field:
    """One field: what it means, and what it must be for the message's source."""

    meaning: str
    expected: Callable[..., Any]


def optimizer_of(model: Model, table: TableConfig) -> Optimizer:
    """The spec that trains `table`."""
    given: Optimizer = optimizer_from(table.optimizer if table.optimizer is not None else model.optimizer)
    return given


def _tags(model: Model) -> list[int]:
    """Of the tables with a live rate, which one of the live optimizers, counted by first use, each has."""
    live = [optimizer_of(model, table) for table in model.tables() if table.name in model.rates]
    kinds = list(dict.fromkeys(map(id, live)))
    return [kinds.index(id(spec)) for spec in live]


def _tag(model: Model, table: TableConfig, _: Optimizer) -> Any:
    names = [each.name for each in model.tables() if each.name in model.rates]
    return _tags(model)[names.index(table.name)] if table.name in model.rates else UNSET


def _constant(model: Model, table: TableConfig, spec: Optimizer) -> Any:
    return UNSET if table.name in model.rates else spec.learning_rate


def _bound(option: str, which: int) -> Callable[[Model, TableConfig, Optimizer], Any]:
    """A limit of the optimizer's `option`, UNSET where there is none."""

    def expected(_: Model, __: TableConfig, spec: Optimizer) -> Any:
        bounds = {
            "clip_weight": (spec.clip_weight_min, spec.clip_weight_max),
            "clipvalue": spec.clipvalue or (None, None),
        }[option]
        limit = bounds[which]  # type: ignore[index]
        return UNSET if limit is None else limit

    return expected


def _of(kind: type[Optimizer], attribute: str, negated: bool = False) -> Callable[[Model, TableConfig, Optimizer], Any]:
    """The optimizer's attribute; UNSET where the table has another optimizer."""

    def expected(_: Model, __: TableConfig, spec: Optimizer) -> Any:
        if not isinstance(spec, kind):
            return UNSET
        value = getattr(spec, attribute)
        return not value if negated else value

    return expected


def _quantization(attribute: str) -> Callable[[Model, TableConfig, Optimizer], Any]:
    def expected(_: Model, table: TableConfig, __: Optimizer) -> Any:
        config = table.quantization_config
        return UNSET if config is None else getattr(config, attribute, True)

    return expected


def _there(spec: Optimizer, kind: type[Optimizer]) -> Any:
    return True if type(spec) is kind else UNSET


MODEL: Final[Mapping[str, Field]] = {
    "mode": Field(
        "TRAINING (2): the program has both passes; what a call enqueues says which of them it runs.", lambda _: 2
    ),
    "batch_size_per_tensor_core": Field(
        "Must not be there where feature_descriptor is; it is computed from their shapes.", lambda _: UNSET
    ),
    "num_hosts": Field("Hosts of the TPU slice: the tables are divided among them.", lambda _: 1),
    "num_tensor_cores": Field("TensorCores that train: one for each replica.", lambda model: model.replicas),
    "sharding_strategy": Field(
        "DIV_DEFAULT (0): consecutive rows on each host, as the hosts' variables and checkpoints have them.", lambda _: 0
    ),
    "pipeline_execution_with_tensor_core": Field(
        "Whether a step's lookup may run before the update of the step before.", lambda model: model.pipelining
    ),
    "profile_data_directory": Field("Where statistics of lookups would be kept; none are.", lambda _: UNSET),
    "spmd_sharding.enabled": Field("Set by a strategy that was given a device assignment, as the made-up one is.", lambda _: True),
    "spmd_sharding.num_cores_per_replica": Field("No replica has more than one core: nothing is split.", lambda _: 1),
    "spmd_sharding.use_manual_partitioning": Field("Nothing is split.", lambda _: UNSET),
    "spmd_sharding.use_shardy_partitioner": Field("Nothing is split.", lambda _: UNSET),
}  # fmt: skip
"""Of the configuration itself: expected(model)."""

FEATURE: Final[Mapping[str, Field]] = {
    "name": Field("A label: the FeatureConfig's own name, else the feature's place in the structure.",
        lambda model, path: model.features[path].name or path),
    "table_id": Field("Which of table_descriptor it is looked up in.",
        lambda model, path: [t.name for t in model.tables()].index(model.features[path].table.name)),
    "input_shape": Field("Of one replica's activations, without their last dimension.",
        lambda model, path: list(model.shape(path))),
}  # fmt: skip
"""Of a feature_descriptor: expected(model, path of the feature)."""

_PARAMETERS: Final[Mapping[str, Field]] = {
    "learning_rate.constant": Field("A rate that never changes.", _constant),
    "learning_rate.dynamic.tag": Field(
        "Which of the rates that every step sends; the same for tables of one optimizer, without gaps.", _tag
    ),
    "clipping_limits.lower.value": Field("Least weight, -inf if not there.", _bound("clip_weight", 0)),
    "clipping_limits.upper.value": Field("Greatest weight, inf if not there.", _bound("clip_weight", 1)),
    "gradient_clipping_limits.lower.value": Field("Least gradient before use.", _bound("clipvalue", 0)),
    "gradient_clipping_limits.upper.value": Field("Greatest gradient before use.", _bound("clipvalue", 1)),
    "weight_decay_factor": Field(
        "Weights shrink by this part of themselves before an update.", lambda _, __, spec: spec.weight_decay_factor or UNSET
    ),
    "multiply_weight_decay_factor_by_learning_rate": Field(
        "The part is multiplied with the learning rate.",
        lambda _, __, spec: bool(spec.multiply_weight_decay_factor_by_learning_rate),
    ),
    "simulated_quantization.enabled": Field("Activations are rounded to buckets.", _quantization("enabled")),
    "simulated_quantization.num_buckets": Field("How many.", _quantization("num_buckets")),
    "simulated_quantization.clipping_limits.lower.value": Field("The first one.", _quantization("lower")),
    "simulated_quantization.clipping_limits.upper.value": Field("The last one.", _quantization("upper")),
    "gradient_accumulation_status": Field(
        "ENABLED (1): gradients of a row are summed and applied once; DISABLED (2): one after another.",
        lambda _, __, spec: 1 if spec.use_gradient_accumulation else 2,
    ),
    "low_dimensional_packing_status": Field("Narrow rows are not packed.", lambda _, __, ___: UNSET),
    "hot_id_replication_configuration.status": Field("Disabled if not there.", lambda _, __, ___: UNSET),
    "adagrad": Field("The rule, which has no parameters.", lambda _, __, spec: _there(spec, Adagrad)),
    "stochastic_gradient_descent": Field(
        "The rule, which has no parameters.", lambda _, __, spec: _there(spec, SGD)
    ),
    "adagrad_momentum.momentum": Field("What stays of the momentum.", _of(AdagradMomentum, "momentum")),
    "adagrad_momentum.use_nesterov": Field("Nesterov's step.", _of(AdagradMomentum, "use_nesterov")),
    "adagrad_momentum.exponent": Field("The root of the accumulator.", _of(AdagradMomentum, "exponent")),
    "adagrad_momentum.beta2": Field("What stays of the accumulator.", _of(AdagradMomentum, "beta2")),
    "adagrad_momentum.epsilon": Field("Added before the root.", _of(AdagradMomentum, "epsilon")),
    "adam.beta1": Field("What stays of the first moment.", _of(Adam, "beta_1")),
    "adam.beta2": Field("What stays of the second moment.", _of(Adam, "beta_2")),
    "adam.epsilon": Field("In the denominator.", _of(Adam, "epsilon")),
    "adam.use_non_lazy_adam": Field("Every row moves at every update.", _of(Adam, "lazy_adam", negated=True)),
    "adam.use_sum_inside_sqrt": Field(
        "m / sqrt(v + epsilon^2) instead of m / (sqrt(v) + epsilon).", _of(Adam, "sum_inside_sqrt")
    ),
    "ftrl.l1": Field("L1 strength.", _of(FTRL, "l1_regularization_strength")),
    "ftrl.l2": Field("L2 strength.", _of(FTRL, "l2_regularization_strength")),
    "ftrl.lr_power": Field("Power of the accumulator.", _of(FTRL, "learning_rate_power")),
    "ftrl.beta": Field("Added to the root of the accumulator.", _of(FTRL, "beta")),
    "ftrl.multiply_linear_by_lr": Field(
        "The linear slot holds learning_rate times as much.", _of(FTRL, "multiply_linear_by_learning_rate")
    ),
    "ftrl.allow_zero_accumulator": Field(
        "Formulas that bear an accumulator of 0.", _of(FTRL, "allow_zero_accumulator")
    ),
}  # fmt: skip

TABLE: Final[Mapping[str, Field]] = {
    "name": Field("What load and retrieve ops call it.", lambda _, table, __: table.name),
    "vocabulary_size": Field("Rows, at least one for each host.", lambda _, table, __: max(table.vocabulary_size, 1)),
    "dimension": Field("Columns.", lambda _, table, __: table.dim),
    "num_features": Field(
        "Must not be there where feature_descriptor is; it is computed from them.", lambda _, __, ___: UNSET
    ),
    **{f"optimization_parameters.{path}": field for path, field in _PARAMETERS.items()},
}  # fmt: skip
"""Of a table_descriptor: expected(model, table, its optimizer)."""

OTHER_RULES: Final = frozenset({
    "bounded_adagrad", "frequency_aware_adagrad", "momentum", "lion", "rms_prop", "centered_rms_prop", "mdl_adagrad_light",
    "adadelta", "proximal_adagrad", "online_yogi", "proximal_yogi", "frequency_estimator", "user_defined_program", "assign",
})  # fmt: skip
"""Rules in optimization_parameters that no layer asks for."""


def differences(configuration: Any, model: Model) -> list[str]:
    """Where `configuration` does not say what it must, a sentence each; fields that are not known here are such too."""
    found = list(_compare("", configuration, MODEL, (model,), skip={"table_descriptor", "feature_descriptor"}))
    tables = itertools.zip_longest(configuration.table_descriptor, model.tables())
    features = itertools.zip_longest(configuration.feature_descriptor, model.features)
    for number, (proto, table) in enumerate(tables):
        where = f"table_descriptor[{number}]."
        found += _compare(where, proto, TABLE, (model, table, optimizer_of(model, table)), skip=OTHER_RULES)
    for number, (proto, path) in enumerate(features):
        found += _compare(f"feature_descriptor[{number}].", proto, FEATURE, (model, path))
    return found


def _compare(
    where: str, proto: Any, fields: Mapping[str, Field], source: tuple[Any, ...], skip: Any = frozenset()
) -> Iterator[str]:
    for path, value in _leaves(proto):
        top = path.split(".")[1 if path.startswith("optimization_parameters.") else 0]
        if path not in fields:
            if top not in skip:
                yield f"{where}{path}: not known here; say what it must be"
            elif top in OTHER_RULES and value is not UNSET:
                yield f"{where}{path}: another rule"
            continue
        expected = fields[path].expected(*source)
        if not _same(value, expected):
            yield f"{where}{path} is {_shown(value)}, must be {_shown(expected)}: {fields[path].meaning}"


def _leaves(proto: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value or UNSET) of every field of a message that is there, and of messages in it."""
    for field in proto.DESCRIPTOR.fields:
        path = prefix + field.name
        value = getattr(proto, field.name)
        if field.message_type is None or not hasattr(value, "DESCRIPTOR"):
            yield path, list(value) if hasattr(value, "extend") else _present(proto, field, value)
        elif not field.message_type.fields:
            yield path, True if proto.HasField(field.name) else UNSET
        else:
            yield from _inside(path, proto, field, value)


def _inside(path: str, proto: Any, field: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Of a message in a message: all UNSET where it is not there."""
    if proto.HasField(field.name) and field.name not in OTHER_RULES:
        yield from _leaves(value, f"{path}.")
    elif field.name in OTHER_RULES:
        yield path, True if proto.HasField(field.name) else UNSET
    else:
        yield from ((name, UNSET) for name, _ in _leaves(value, f"{path}."))


def _present(proto: Any, field: Any, value: Any) -> Any:
    """Members of a oneof and of wrappers say that they are there by being there."""
    if field.containing_oneof is not None:
        return value if proto.HasField(field.name) else UNSET
    return value if value or proto.DESCRIPTOR.name == "FloatValue" else _DEFAULT


def _same(value: Any, expected: Any) -> bool:
    if value is _DEFAULT:
        return expected is UNSET or not expected
    if value is UNSET or expected is UNSET:
        return value is expected
    return bool(np.float32(value) == np.float32(expected)) if isinstance(expected, float) else bool(value == expected)


def _shown(value: Any) -> str:
    return "not there" if value in (UNSET, _DEFAULT) else repr(value)


def completed(configuration: Any) -> tuple[int, list[int]]:
    """(batch_size_per_tensor_core, num_features of every table) that TensorFlow computes of the feature descriptors.

    Source: PopulateBatchSizeAndFeatureCounts: the batch is the greatest common divisor of the features' numbers of samples.
    """
    samples = [math.prod(feature.input_shape) for feature in configuration.feature_descriptor]
    batch = math.gcd(*samples)
    counts = [0] * len(configuration.table_descriptor)
    for feature, size in zip(configuration.feature_descriptor, samples, strict=True):
        counts[feature.table_id] += size // batch
    return batch, counts
