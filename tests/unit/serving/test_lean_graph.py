"""Graphs that need no optimizer: which are, and that what is done to them leaves their numbers alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, saved_model_pb2

from tpuembed_serving.tensorflow.lean_graph import is_lean, make_lean

RANDOM = np.random.default_rng(5)
INPUT = RANDOM.normal(size=(7, 4)).astype(np.float32)
KERNEL = RANDOM.normal(size=(4, 6)).astype(np.float32)
BIAS = RANDOM.normal(size=6).astype(np.float32)
PLAIN = INPUT.astype(np.float64) @ KERNEL + BIAS

Body = Callable[[Any, Any, Any], Any]


def product(x: Any, kernel: Any, bias: Any) -> Any:
    """A dense layer, with the operations that Keras gives it."""
    return tf.nn.bias_add(tf.matmul(x, kernel), bias)


BODIES: dict[str, tuple[Body, Any, int]] = {
    "relu": (lambda *a: tf.nn.relu(product(*a)), np.maximum(PLAIN, 0), 1),
    "no activation": (product, PLAIN, 1),
    "another activation": (lambda *a: tf.tanh(product(*a)), np.tanh(PLAIN), 1),
    "relu beside": (lambda *a: (lambda y: y + tf.nn.relu(y))(product(*a)), PLAIN + np.maximum(PLAIN, 0), 1),
    "transposed": (lambda x, k, b: tf.nn.bias_add(tf.matmul(x, tf.transpose(k), transpose_b=True), b), PLAIN, 1),
    "product beside": (lambda x, k, b: (lambda y: tf.nn.bias_add(y, b) - y)(tf.matmul(x, k)), BIAS + 0 * PLAIN, 0),
    "added": (lambda x, k, b: tf.matmul(x, k) + b, PLAIN, 0),
    "two layers": (
        lambda x, k, b: product(tf.nn.relu(product(x, k, b)), tf.transpose(k), b[:4]),
        np.maximum(PLAIN, 0) @ KERNEL.T + BIAS[:4],
        2,
    ),
}


def save(body: Body, folder: Path) -> Any:
    """The meta graph of a signature of `body`, called as saved signatures are: by a function of a function."""

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, name="x")], autograph=False)
    def served(x: Any) -> Any:
        return {"y": body(x, tf.constant(KERNEL), tf.constant(BIAS))}

    tf.saved_model.save(tf.Module(), str(folder), signatures={"serving_default": served.get_concrete_function()})
    return saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes()).meta_graphs[0]


def run(meta_graph: Any) -> Any:
    """Its output for INPUT, without TensorFlow's optimizer."""
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    signature = meta_graph.signature_def["serving_default"]
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        tf.graph_util.import_graph_def(meta_graph.graph_def, name="")
        return session.run(signature.outputs["y"].name, {signature.inputs["x"].name: INPUT})


def ops(graph: Any) -> list[str]:
    """Of all functions."""
    return [node.op for function in graph.library.function for node in function.node_def]


@pytest.mark.parametrize("name", BODIES)
def test_a_lean_graph_computes_the_same(name: str, tmp_path: Path) -> None:
    body, truth, layers = BODIES[name]
    meta_graph = save(body, tmp_path)
    assert is_lean(meta_graph.graph_def)
    make_lean(meta_graph.graph_def)
    assert ops(meta_graph.graph_def).count("_FusedMatMul") == layers
    np.testing.assert_allclose(run(meta_graph), truth, atol=1e-5)


def test_an_activation_that_waits_for_something_still_does(tmp_path: Path) -> None:
    def body(x: Any, kernel: Any, bias: Any) -> Any:
        layer = product(x, kernel, bias)
        with tf.control_dependencies([tf.reduce_sum(x)]):
            return tf.nn.relu(layer)

    meta_graph = save(body, tmp_path)
    make_lean(meta_graph.graph_def)
    found = [node for function in meta_graph.graph_def.library.function for node in function.node_def]
    assert [node.op for node in found if any(name.startswith("^") for name in node.input) and node.op == "Relu"]
    assert [node.op for node in found].count("_FusedMatMul") == 1
    np.testing.assert_allclose(run(meta_graph), np.maximum(PLAIN, 0), atol=1e-5)


def test_calls_of_a_signature_are_in_line_and_those_that_shall_not_be_are_not(tmp_path: Path) -> None:
    aside = tf.function(
        lambda x: x * 2.0,
        input_signature=[tf.TensorSpec([None, 6], tf.float32)],
        autograph=False,
        experimental_attributes={"_noinline": True},
    ).get_concrete_function()
    meta_graph = save(lambda *a: aside(product(*a)), tmp_path)
    make_lean(meta_graph.graph_def)
    bodies = (meta_graph.graph_def.node, *(one.node_def for one in meta_graph.graph_def.library.function))
    calls = [
        node for body in bodies for node in body if node.op.endswith("PartitionedCall") and node.attr["Tin"].list.type
    ]
    functions = {one.signature.name: one for one in meta_graph.graph_def.library.function}
    marks = {
        (node.attr["f"].func.name, "_lower_as_multi_device_function" in node.attr)
        for node in calls
        if "__inference__" not in node.attr["f"].func.name  # of the saver
    }
    assert {marked for name, marked in marks if "_noinline" in functions[name].attr} == {False}
    assert {marked for name, marked in marks if "_noinline" not in functions[name].attr} == {True}
    np.testing.assert_allclose(run(meta_graph), 2 * PLAIN, atol=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        lambda x, k, b: tf.einsum("ij,jk->ik", x, k) + b,
        lambda x, k, b: tf.nn.gelu(product(x, k, b)),
        lambda x, k, b: tf.map_fn(lambda row: row * 2.0, product(x, k, b)),
    ],
)
def test_what_the_optimizer_may_know_better_is_left_to_it(body: Body, tmp_path: Path) -> None:
    assert not is_lean(save(body, tmp_path).graph_def)
