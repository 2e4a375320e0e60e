"""The checks of the V1 path, as functions that fail with an AssertionError."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from tensorflow.core.protobuf.tpu.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration

from tests.tpu.v1.engine import activations
from tests.tpu.v1.fields import completed, differences, optimizer_of
from tests.tpu.v1.models import BATCH, Ids, Model
from tests.tpu.v1.tracing import Step, Traced

__all__ = ["CHECKS", "GOLDEN", "described"]

Array = np.ndarray[Any, Any]
GOLDEN: Final = Path(__file__).parent / "golden"


def fields_mean_what_they_must(name: str, model: Model, traced: Traced) -> None:
    """Every field of the configuration says what its documentation asks for, for the layer's arguments."""
    assert differences(traced.configuration, model) == []


def shapes_complete_the_configuration(name: str, model: Model, traced: Traced) -> None:
    """What TensorFlow computes of the features' shapes: one batch size, and samples of every table in units of it."""
    batch, counts = completed(traced.configuration)
    assert batch == BATCH
    for table, count in zip(model.tables(), counts, strict=True):
        shapes = [model.shape(path) for path, feature in model.features.items() if feature.table.name == table.name]
        assert count == sum(np.prod(shape) for shape in shapes) / BATCH, table.name


def ops_are_golden(name: str, model: Model, traced: Traced) -> None:
    """Attributes, shapes and arrays of a step's ops, and the ops that load the tables, equal the committed ones."""
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    assert json.loads(json.dumps(described(traced))) == golden


def all_ops_have_one_configuration(name: str, model: Model, traced: Traced) -> None:
    """Ops that carry the configuration carry the same: the engine fails, or reads other rows, otherwise."""
    assert {"ConfigureTPUEmbedding", "RecvTPUEmbeddingActivations", "SendTPUEmbeddingGradients"} <= set(traced.given)
    for op, serialized in traced.given.items():
        assert TPUEmbeddingConfiguration.FromString(serialized) == traced.configuration, op


def enqueued_ids_give_the_lookup(name: str, model: Model, traced: Traced) -> None:
    """What is enqueued, read as documented, gives the activations of a plain lookup: every replica, training or not."""
    tables = _tables(model)
    for step in (traced.training, traced.evaluation):
        [enqueue] = step.enqueues
        combiners = [combiner.decode() for combiner in enqueue.get_attr("combiners")]
        for replica in range(model.replicas):
            found = activations(traced.configuration, combiners, step.enqueued[replica], list(tables.values()))
            batch = model.batch(replica)
            for (path, feature), activation in zip(model.features.items(), found, strict=True):
                truth = _lookup(model, path, batch[path], tables[feature.table.name])
                np.testing.assert_allclose(activation, truth, rtol=1e-12, atol=1e-12, err_msg=path)


def a_call_is_one_enqueue_and_one_receive(name: str, model: Model, traced: Traced) -> None:
    """A training call sends gradients once, an evaluation call never; a name ties the ops of a call, and no others."""
    steps = (traced.training, traced.evaluation)
    assert [[len(ops) for ops in (s.enqueues, s.receives, s.sends)] for s in steps] == [[1, 1, 1], [1, 1, 0]]
    keys = [{op.get_attr("_tpu_embedding_layer") for op in (*s.enqueues, *s.receives, *s.sends)} for s in steps]
    assert [len(key) for key in keys] == [1, 1]
    assert keys[0] != keys[1]


def modes_follow_the_gradients(name: str, model: Model, traced: Traced) -> None:
    """Where gradients are sent, TensorFlow's pass leaves "train", else "inference"; the op is left to it to number."""
    assert [_mode(step) for step in (traced.training, traced.evaluation)] == [b"train", b"inference"]
    for step in (traced.training, traced.evaluation):
        [enqueue] = step.enqueues
        assert enqueue.get_attr("device_ordinal") == -1, "a later pass puts the TPU of each replica here"


def activations_have_their_shapes(name: str, model: Model, traced: Traced) -> None:
    """Received activations, and the gradients that are sent, are [*input_shape, dim], in the order of the features."""
    shapes = [(*model.shape(path), feature.table.dim) for path, feature in model.features.items()]
    for step in (traced.training, traced.evaluation):
        [receive] = step.receives
        assert [tuple(output.shape) for output in receive.outputs] == shapes
    [send] = traced.training.sends
    assert [tuple(gradient.shape) for gradient in traced.training.arguments(send)["inputs"]] == shapes


def gradients_are_those_of_the_loss(name: str, model: Model, traced: Traced) -> None:
    """Half the sum of squares has the activations for gradients: each feature's own, once."""
    [receive], [send] = traced.training.receives, traced.training.sends
    random = np.random.default_rng(5)
    received = {output.name: random.normal(size=output.shape).astype(np.float32) for output in receive.outputs}
    sent = traced.training.on_host(traced.training.arguments(send)["inputs"], 0, received)
    for output, gradient in zip(receive.outputs, sent, strict=True):
        np.testing.assert_allclose(gradient, received[output.name], rtol=1e-6)


def live_rates_are_sent_by_tag(name: str, model: Model, traced: Traced) -> None:
    """The rates of the step, in the order of the tags, one for each optimizer that has a live one."""
    [send] = traced.training.sends
    rates = traced.training.on_host(traced.training.arguments(send)["learning_rates"], 0)
    by_tag: dict[int, float] = {}
    for table in traced.configuration.table_descriptor:
        rate = table.optimization_parameters.learning_rate
        if rate.WhichOneof("learning_rate") == "dynamic":
            by_tag[rate.dynamic.tag] = model.rates[table.name]
    assert [float(rate) for rate in rates] == [by_tag[tag] for tag in sorted(by_tag)]
    assert sorted(by_tag) == list(range(len(rates)))


def slots_are_loaded_where_they_belong(name: str, model: Model, traced: Traced) -> None:
    """Every table is loaded by its optimizer's op: rows and slots in the op's own places, slots at their first values."""
    ops = {"sgd": "StochasticGradientDescent", "adagrad": "Adagrad", "adam": "ADAM", "ftrl": "FTRL"}
    ops["adagrad_momentum"] = "AdagradMomentum"
    assert sorted(load.table for load in traced.loads) == sorted(table.name for table in model.tables())
    for load in traced.loads:
        [table] = [table for table in model.tables() if table.name == load.table]
        spec = optimizer_of(model, table)
        assert load.op == f"LoadTPUEmbedding{ops[spec.kind]}Parameters"
        assert (load.shard, load.shards) == (0, 1)
        assert load.inputs == {role: role for role in ("parameters", *spec.slots)}
        rows = traced.initial[table.name]
        assert rows["parameters"].shape == (table.vocabulary_size, table.dim)
        for slot in spec.slots:
            first = {"accumulators": getattr(spec, "initial_accumulator_value", 0.0)}.get(slot, 0.0)
            np.testing.assert_array_equal(
                rows[slot], np.full((table.vocabulary_size, table.dim), first, np.float32), err_msg=slot
            )


CHECKS: Final[Mapping[str, Callable[[str, Model, Traced], None]]] = {
    check.__name__: check
    for check in (
        fields_mean_what_they_must,
        shapes_complete_the_configuration,
        ops_are_golden,
        all_ops_have_one_configuration,
        enqueued_ids_give_the_lookup,
        a_call_is_one_enqueue_and_one_receive,
        modes_follow_the_gradients,
        activations_have_their_shapes,
        gradients_are_those_of_the_loss,
        live_rates_are_sent_by_tag,
        slots_are_loaded_where_they_belong,
    )
}
"""Name -> check(name of the model, the model, what was traced)."""


def _mode(step: Step) -> bytes:
    """What TensorFlow's pass makes the enqueue op's mode.

    Source: UpdateTPUEmbeddingModePass in tensorflow/core/tpu/graph_rewrite/update_tpu_embedding_ops_passes.cc: the choice of
    SelectV2 is replaced by its second input where a call sends gradients, else by its third.
    """
    [enqueue] = step.enqueues
    select = step.arguments(enqueue)["mode_override"].op
    assert select.type == "SelectV2"
    key = enqueue.get_attr("_tpu_embedding_layer")
    training = any(send.get_attr("_tpu_embedding_layer") == key for send in step.sends)
    mode: bytes = step.on_host(select.inputs[1 if training else 2], 0)
    return mode


def _tables(model: Model) -> dict[str, Array]:
    random = np.random.default_rng(11)
    return {table.name: random.normal(size=(table.vocabulary_size, table.dim)) for table in model.tables()}


def _lookup(model: Model, path: str, ids: Ids, table: Array) -> Array:
    """Activations [*shape, dim] as tf.nn.embedding_lookup_sparse documents them."""
    feature = model.features[path]
    if model.kinds[path] == "dense":
        return table[ids.values]
    ends = np.cumsum(ids.counts)
    examples = [np.arange(end - count, end) for end, count in zip(ends, ids.counts, strict=True)]
    if feature.max_sequence_length:
        out = np.zeros((BATCH, feature.max_sequence_length, table.shape[1]))
        for example, of in enumerate(examples):
            kept = of[: feature.max_sequence_length]
            out[example, : len(kept)] = table[ids.values[kept]]
        return out
    weights = np.ones(len(ids.values)) if ids.weights is None else ids.weights.astype(np.float64)
    return np.stack([_combined(table[ids.values[of]], weights[of], feature.table.combiner) for of in examples])


def _combined(rows: Array, weights: Array, combiner: str) -> Array:
    if not len(rows):
        return np.zeros(rows.shape[1])
    divisor = {"sum": 1.0, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}[combiner]
    return np.asarray((rows * weights[:, None]).sum(0) / divisor)


# ---- what is golden of the ops


def described(traced: Traced) -> dict[str, Any]:
    """Both steps' ops and the loads, as JSON values."""
    steps = {"training": traced.training, "evaluation": traced.evaluation}
    return {
        **{name: _step(step) for name, step in steps.items()},
        "loads": [
            {
                "op": load.op,
                "table": load.table,
                "shard": load.shard,
                "shards": load.shards,
                "inputs": dict(load.inputs),
            }
            for load in traced.loads
        ],
    }


def _step(step: Step) -> dict[str, Any]:
    [enqueue], [receive] = step.enqueues, step.receives
    return {
        "enqueue": {
            "combiners": [combiner.decode() for combiner in enqueue.get_attr("combiners")],
            "device_ordinal": enqueue.get_attr("device_ordinal"),
            "mode": _mode(step).decode(),
            "types": {key: enqueue.get_attr(key).name for key in ("T1", "T2", "T3")},
            "replicas": [
                {name: [array.tolist() for array in arrays] for name, arrays in of.items()} for of in step.enqueued
            ],
        },
        "received": [output.shape.as_list() for output in receive.outputs],
        "sent": [
            {name: [tensor.shape.as_list() for tensor in value] for name, value in step.arguments(send).items()}
            for send in step.sends
        ],
    }
