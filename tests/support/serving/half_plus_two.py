"""The models that TensorFlow Serving's server tests serve, written anew: y = x / 2 + 2, in the ways that TensorFlow saves.

Source of their names and signatures: tensorflow_serving/servables/tensorflow/testdata/saved_model_half_plus_two.py.
Run as a program, the module saves Keras models, one of them under a distribution strategy: that needs two logical CPUs,
which a process has to ask for before anything else.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

__all__ = ["VERSION", "save_all", "save_graph"]

VERSION = "00000123"
_FEATURES = {
    "x": tf.io.FixedLenFeature([1], tf.float32),
    "x2": tf.io.FixedLenFeature([1], tf.float32, [0.0]),
}


def save_all(folder: Path) -> None:
    """Save each model under its name in `folder`."""
    with subprocess.Popen([sys.executable, "-m", __name__, str(folder)], stderr=subprocess.PIPE, text=True) as keras:
        _save_others(folder)
        _, errors = keras.communicate(timeout=120)
    assert keras.returncode == 0, errors


def _save_others(folder: Path) -> None:
    save_graph(folder / "half_plus_two", 2.0)
    save_graph(folder / "half_plus_three", 3.0)
    _save_module(folder / "half_plus_two_tf2")
    _save_function(folder / "tf_saved_model_save")
    _save_two_signatures(folder / "two_signatures")
    lite = folder / "half_plus_two_tflite" / VERSION
    lite.mkdir(parents=True)
    (lite / "model.tflite").write_bytes(b"\x1c\x00\x00\x00TFL3")


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


class _HalfPlusTwo(tf.Module):
    """The same as TensorFlow 2 programs save it."""

    def __init__(self, asset: Path) -> None:
        super().__init__()
        self.a, self.b = tf.Variable(0.5), tf.Variable(2.0)
        self.asset = tf.saved_model.Asset(str(asset))

    @tf.function(input_signature=[tf.TensorSpec([1], tf.float32)])
    def predict(self, x: Any) -> dict[str, Any]:
        return {"y": self.a * x + self.b}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "inputs")])
    def regress(self, examples: Any) -> dict[str, Any]:
        return {"outputs": self.a * tf.io.parse_example(examples, _FEATURES)["x"] + self.b}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "inputs")])
    def classify(self, examples: Any) -> dict[str, Any]:
        return {"scores": self.a * tf.io.parse_example(examples, _FEATURES)["x"] + self.b}


def _save_module(model_dir: Path) -> None:
    module = _HalfPlusTwo(model_dir.with_name("foo.txt"))
    signatures = {
        "serving_default": module.predict,
        "regress_x_to_y": module.regress,
        "classify_x_to_y": module.classify,
    }
    tf.saved_model.save(module, str(model_dir / VERSION), signatures=signatures)


def _save_function(model_dir: Path) -> None:
    """Save y = 3 * 2 * x, with the variables in a tf.train.Checkpoint."""
    root = tf.train.Checkpoint(v1=tf.Variable(3.0), v2=tf.Variable(2.0))
    root.f = tf.function(lambda x: {"y": root.v1 * root.v2 * x})
    concrete = root.f.get_concrete_function(tf.TensorSpec(None, tf.float32))
    tf.saved_model.save(root, str(model_dir / VERSION), concrete)


def _save_two_signatures(model_dir: Path) -> None:
    """Save two functions that return constants and no batch dimension."""
    root = tf.train.Checkpoint()
    signature = [tf.TensorSpec(None, tf.float32)]
    root.f = tf.function(lambda x: {"y": 1.0}, input_signature=signature)  # noqa: ARG005
    root.g = tf.function(lambda x: {"y": 2.0}, input_signature=signature)  # noqa: ARG005
    signatures = {"serving_default": root.f, "custom_signature_key": root.g}
    tf.saved_model.save(root, str(model_dir / VERSION), signatures)


def _save_keras(folder: Path) -> None:
    import keras

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    x = keras.Input((1,), dtype="float32", name="x")
    sequential = keras.Sequential([x, keras.layers.Lambda(lambda values: values, name="y")])
    tf.saved_model.save(sequential, str(folder / "sequential" / VERSION))
    with tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
        dense = keras.layers.Dense(1, kernel_initializer="ones", bias_initializer="zeros")
        mirrored = keras.Sequential([x, dense, keras.layers.Lambda(lambda values: values, name="y")])
    # tf.saved_model.save of a Keras 3 model of a strategy leaves its variables uninitialized for TensorFlow's C++ loader.
    mirrored.export(str(folder / "mirrored" / VERSION), verbose=False)


if __name__ == "__main__":
    _save_keras(Path(sys.argv[1]))
