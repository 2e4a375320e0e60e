"""Broken variants of the V1 path: each must make its check fail."""

import dataclasses
import itertools
import types
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import tensorflow as tf
from tensorflow.core.protobuf.tpu.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration
from tensorflow.python.tpu import tpu_embedding_v2, tpu_embedding_v2_utils

from tests.tpu.numbers.variant import Variant
from tpuembed.backends import accelerator, tf_config, tpu_v1
from tpuembed.backends.row_optimizers import learning_rate
from tpuembed.backends.tf_tpu import HardwareEngine

__all__ = ["BROKEN"]

Theirs = tpu_embedding_v2.TPUEmbedding


def _optimizer(kind: str, **wrong: Any) -> Callable[[], Any]:
    """Optimizers of `kind` reach TensorFlow with other hyper-parameters."""
    right = tf_config.optimizer_to_tf

    def broken(spec: Any) -> Any:
        return right(dataclasses.replace(spec, **wrong) if spec.kind == kind else spec)

    return lambda: mock.patch.object(tf_config, "optimizer_to_tf", broken)


def _table(**wrong: Any) -> Callable[[], Any]:
    """Tables reach TensorFlow with another field: wrong[field](right value)."""
    right = tf_config._table_to_tf

    def broken(table: Any) -> Any:
        changed = {field: change(getattr(table, field)) for field, change in wrong.items()}
        return right(dataclasses.replace(table, **changed))

    return lambda: mock.patch.object(tf_config, "_table_to_tf", broken)


def _calling(method: str, broken: Callable[..., Any], owner: Any = HardwareEngine) -> Callable[[], Any]:
    """The method, called through broken(right method, engine, ...)."""
    right = getattr(owner, method)

    def instead(*arguments: Any, **named: Any) -> Any:
        return broken(right, *arguments, **named)

    return lambda: mock.patch.object(owner, method, instead)


def _twice(right: Any, *arguments: Any, **named: Any) -> None:
    right(*arguments, **named)
    right(*arguments, **named)


def _scaled(right: Any, engine: Any, gradients: Any, **named: Any) -> None:
    right(engine, [2.0 * gradient for gradient in gradients], **named)


def _swapped(right: Any, engine: Any, gradients: Any, **named: Any) -> None:
    """Of two features of one shape, in the model `defaults`."""
    first, second, *others = gradients
    right(engine, [second, first, *others], **named)


def _without_length(right: Any, engine: Any, shapes: Any) -> None:
    right(engine, [shape[:1] for shape in shapes])


def _not_pipelined(right: Any, engine: Any, features: Any, _: bool) -> None:
    right(engine, features, False)


def _columns_swapped(right: Any, engine: Any, tensor: Any, *others: Any) -> None:
    right(engine, tf.SparseTensor(tensor.indices[:, ::-1], tensor.values, tensor.dense_shape), *others)


def _splits_shifted(right: Any, engine: Any, tensor: Any, weight: Any, splits: Any, *others: Any) -> None:
    right(engine, tensor, weight, splits, *others)
    splits[-1] = tf.concat([splits[-1][:1], splits[-1][:-2], splits[-1][-1:]], 0)


def _reversed(right: Any, engine: Any, tensor: Any, weight: Any, *others: Any) -> None:
    """Ids without weights are enqueued last to first, which gives the same sums."""
    if weight is None:
        tensor = tf.SparseTensor(tensor.indices[::-1], tensor.values[::-1], tensor.dense_shape)
    right(engine, tensor, weight, *others)


def _other_configuration() -> Any:
    """Gradients are sent with a configuration of two hosts."""
    right = tpu_embedding_v2.tpu_ops.send_tpu_embedding_gradients

    def broken(config: bytes, **arguments: Any) -> Any:
        proto = TPUEmbeddingConfiguration.FromString(config)
        proto.num_hosts = 2
        return right(config=proto.SerializeToString(), **arguments)

    return mock.patch.object(tpu_embedding_v2.tpu_ops, "send_tpu_embedding_gradients", broken)


def _always_training(right: Any, *arguments: Any, **named: Any) -> Any:
    chosen = named["mode_override"].op
    training = tf.where(tf.identity(True), chosen.inputs[1], chosen.inputs[1])
    return right(*arguments, **{**named, "mode_override": training})


def _combiners_reversed() -> Any:
    right = Theirs._generate_enqueue_op

    def broken(engine: Any, *arguments: Any, **named: Any) -> Any:
        tables = engine._table_config
        engine._table_config = tables[::-1]
        try:
            return right(engine, *arguments, **named)
        finally:
            engine._table_config = tables

    return mock.patch.object(Theirs, "_generate_enqueue_op", broken)


def _one_name() -> Any:
    return mock.patch.object(tpu_v1, "itertools", types.SimpleNamespace(count=itertools.repeat))


def _frozen_rate() -> Any:
    return mock.patch.object(
        accelerator, "_bound", lambda spec, _: spec if not callable(spec.learning_rate) else
        dataclasses.replace(spec, learning_rate=0.5)
    )  # fmt: skip


def _rate_of_the_last_step() -> Any:
    return mock.patch.object(accelerator, "learning_rate", lambda spec, step: learning_rate(spec, step + 100))


def _a_tag_each() -> Any:
    """Rates are no longer shared by the tables of one optimizer."""
    right = tpu_embedding_v2_utils.TableConfig._set_table_descriptor

    def broken(table: Any, descriptor: Any, hosts: int, tags: Any) -> None:
        right(table, descriptor, hosts, tags)
        rate = descriptor.optimization_parameters.learning_rate
        if rate.HasField("dynamic") and table.name == "d":
            rate.dynamic.tag = len(tags)

    return mock.patch.object(tpu_embedding_v2_utils.TableConfig, "_set_table_descriptor", broken)


def _slots_exchanged() -> Any:
    """Adam's slots are loaded into each other's places."""
    right = tpu_embedding_v2_utils.Adam._load

    def broken(optimizer: Any) -> Any:
        load = right(optimizer)
        return lambda **arguments: load(
            **{**arguments, "momenta": arguments["velocities"], "velocities": arguments["momenta"]}
        )

    return mock.patch.object(tpu_embedding_v2_utils.Adam, "_load", broken)


FIELDS, LOOKUP, CALL, GRADIENTS = (
    "fields_mean_what_they_must",
    "enqueued_ids_give_the_lookup",
    "a_call_is_one_enqueue_and_one_receive",
    "gradients_are_those_of_the_loss",
)
LOADS = "slots_are_loaded_where_they_belong"
OTHER_COMBINER = {"sum": "mean", "mean": "sqrtn", "sqrtn": "sum"}

BROKEN: Final = [
    Variant("adam_epsilon", "Adam's epsilon is another one", FIELDS, "five_optimizers",
        _optimizer("adam", epsilon=0.02)),
    Variant("momentum_exponent", "AdagradMomentum's exponent stays at its default", FIELDS, "five_optimizers",
        _optimizer("adagrad_momentum", exponent=2.0)),
    Variant("ftrl_l1_and_l2", "FTRL's two strengths are exchanged", FIELDS, "five_optimizers",
        _optimizer("ftrl", l1_regularization_strength=0.2, l2_regularization_strength=0.1)),
    Variant("sgd_accumulates", "SGD sums the gradients of duplicates although it was told not to", FIELDS, "five_optimizers",
        _optimizer("sgd", use_gradient_accumulation=True)),
    Variant("no_weight_limit", "clip_weight_max is dropped", FIELDS, "five_optimizers",
        _optimizer("adagrad_momentum", clip_weight_max=None)),
    Variant("no_gradient_limit", "clipvalue is dropped", FIELDS, "five_optimizers",
        _optimizer("adagrad", clipvalue=None)),
    Variant("default_optimizer", "a table's own Adagrad is replaced by a default one", FIELDS, "defaults",
        _optimizer("adagrad", learning_rate=0.01)),
    Variant("slot_initial_value", "accumulators begin with another value", LOADS, "five_optimizers",
        _optimizer("ftrl", initial_accumulator_value=0.1)),
    Variant("slots_exchanged", "momenta are loaded as velocities", LOADS, "five_optimizers", _slots_exchanged),
    Variant("one_row_more", "a table has a row too many", FIELDS, "defaults",
        _table(vocabulary_size=lambda rows: rows + 1)),
    Variant("combiner", "tables have another combiner", LOOKUP, "defaults", _table(combiner=OTHER_COMBINER.__getitem__)),
    Variant("combiners_reversed", "combiners are in another order than the tables", LOOKUP, "five_optimizers",
        _combiners_reversed),
    Variant("no_weights", "weights are not enqueued", LOOKUP, "defaults",
        lambda: mock.patch.object(tpu_v1, "given_weights", return_value=None)),
    Variant("columns_swapped", "the columns of sparse indices are exchanged", LOOKUP, "live_rates",
        _calling("_add_data_for_sparse_tensor", _columns_swapped, Theirs)),
    Variant("splits_shifted", "row splits are those of the example before", LOOKUP, "defaults",
        _calling("_add_data_for_ragged_tensor", _splits_shifted, Theirs)),
    Variant("sent_twice", "a gradient is sent twice", CALL, "defaults", _calling("apply_gradients", _twice)),
    Variant("never_sent", "gradients are not sent", CALL, "defaults",
        lambda: mock.patch.object(HardwareEngine, "apply_gradients", return_value=None)),
    Variant("one_name", "calls are not told apart", CALL, "defaults", _one_name),
    Variant("doubled", "gradients are twice as large", GRADIENTS, "defaults", _calling("apply_gradients", _scaled)),
    Variant("gradients_swapped", "two features get each other's gradients", GRADIENTS, "defaults",
        _calling("apply_gradients", _swapped)),
    Variant("no_sequence", "a sequence feature has the shape of a combined one", FIELDS, "five_optimizers",
        _calling("start", _without_length)),
    Variant("sequence_of_one", "a sequence feature counts as one sample of an example", "shapes_complete_the_configuration",
        "five_optimizers", _calling("start", _without_length)),
    Variant("sequence_flattened", "a sequence feature's activations are those of a combined one",
        "activations_have_their_shapes", "five_optimizers", _calling("start", _without_length)),
    Variant("ids_reversed", "ids are enqueued last to first", "ops_are_golden", "live_rates",
        _calling("_add_data_for_sparse_tensor", _reversed, Theirs)),
    Variant("two_hosts", "gradients are sent with another configuration", "all_ops_have_one_configuration", "defaults",
        _other_configuration),
    Variant("always_training", "an evaluation is enqueued as training", "modes_follow_the_gradients", "defaults",
        _calling("_generate_enqueue_op", _always_training, Theirs)),
    Variant("not_pipelined", "pipelining is dropped", FIELDS, "five_optimizers", _calling("__init__", _not_pipelined)),
    Variant("a_tag_each", "tables of one optimizer do not share its rate", FIELDS, "live_rates", _a_tag_each),
    Variant("frozen_rate", "a live rate is frozen", FIELDS, "live_rates", _frozen_rate),
    Variant("other_step", "a schedule is read at another step", "live_rates_are_sent_by_tag", "live_rates",
        _rate_of_the_last_step),
]  # fmt: skip
"""Which check, on which model, catches it."""
