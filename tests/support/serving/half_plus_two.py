"""The model that TensorFlow Serving's server tests serve, written anew: y = x / 2 + 2, as TensorFlow 1 programs save it.

Source of its names and signatures: tensorflow_serving/servables/tensorflow/testdata/saved_model_half_plus_two.py.
"""

from pathlib import Path
from typing import Any

import tensorflow as tf

__all__ = ["VERSION", "save_graph"]

VERSION = "00000123"
_FEATURES = {
    "x": tf.io.FixedLenFeature([1], tf.float32),
    "x2": tf.io.FixedLenFeature([1], tf.float32, [0.0]),
}


def save_graph(model_dir: Path, b: float) -> None:
    """Save a graph with placeholders, variables, an asset and an initializing operation, as TensorFlow 1 programs do."""
    v1 = tf.compat.v1
    asset = model_dir.with_name("foo.txt")
    asset.write_text("asset-file-contents", encoding="utf-8")
    with tf.Graph().as_default(), v1.Session() as session:
        variables = {
            name: v1.get_variable(name, initializer=value)
            for name, value in (("a", 0.5), ("b", b), ("c", 3.0), ("a2", 0.5), ("c2", 3.0))
        }
        serialized = v1.placeholder(tf.string, [None], "tf_example")
        features = v1.parse_example(serialized, _FEATURES)
        x, x2 = tf.identity(features["x"], "x"), tf.identity(features["x2"], "x2")
        y = tf.identity(variables["a"] * x + variables["b"], "y")
        y2 = tf.identity(variables["a"] * x + variables["c"], "y2")
        y3 = tf.identity(variables["a2"] * x2 + variables["c2"], "y3")
        path = tf.constant(str(asset))
        v1.add_to_collection(v1.GraphKeys.ASSET_FILEPATHS, path)
        name = v1.Variable("foo.txt", name="filename_tensor", trainable=False, collections=[])
        session.run(v1.global_variables_initializer())
        builder = v1.saved_model.Builder(str(model_dir / VERSION))
        builder.add_meta_graph_and_variables(
            session,
            [tf.saved_model.SERVING],
            signature_def_map={
                "serving_default": _signature("predict", {"x": x}, {"y": y}),
                "regress_x_to_y": _signature("regress", {"inputs": serialized}, {"outputs": y}),
                "regress_x_to_y2": _signature("regress", {"inputs": serialized}, {"outputs": y2}),
                "regress_x2_to_y3": _signature("regress", {"inputs": x2}, {"outputs": y3}),
                "classify_x_to_y": _signature("classify", {"inputs": serialized}, {"scores": y}),
            },
            assets_collection=v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
            main_op=tf.group(name.assign("foo.txt")),
        )
        builder.save()


def _signature(method: str, inputs: dict[str, Any], outputs: dict[str, Any]) -> Any:
    utilities = tf.compat.v1.saved_model
    infos = [
        {alias: utilities.build_tensor_info(tensor) for alias, tensor in tensors.items()}
        for tensors in (inputs, outputs)
    ]
    return utilities.build_signature_def(*infos, f"tensorflow/serving/{method}")
