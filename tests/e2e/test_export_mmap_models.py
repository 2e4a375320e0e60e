"""Whole models whose tables are mapped: the model's numbers by every loader, also where the version was moved."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.serving.process import ServerProcess, run_command
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.manifest import Manifest

Array = npt.NDArray[Any]
IDS = np.array([[3, 1, 3], [-1, -1, -1], [29, 0, -1]])
INPUTS: Mapping[str, Array] = {
    "user": np.array([0, 19, 7]),
    "watched": IDS,
    "age": np.array([[1.0, -2.0], [0.0, 0.5], [3.0, 4.0]], np.float32),
}


def build() -> Any:
    """Two stacks, of which one holds two tables; a list and a float input; a dense layer, and one of moving averages."""
    inputs = {
        "user": keras.Input((), dtype="int64", name="user"),
        "watched": keras.Input((None,), dtype="int64", ragged=True, name="watched"),
        "age": keras.Input((2,), dtype="float32", name="age"),
    }
    tables = {"users": TableConfig(20, 8, "users"), "videos": TableConfig(30, 8, "v/x.1", combiner="sqrtn")}
    tags = FeatureConfig(TableConfig(30, 4, "tags", combiner="sum"))
    features = {"user": FeatureConfig(tables["users"]), "watched": FeatureConfig(tables["videos"]), "tags": tags}
    layer = TPUEmbedding(features, optimizer="adagrad", name="embedding")
    rows = layer({"user": inputs["user"], "watched": inputs["watched"], "tags": inputs["watched"]})
    joined = keras.ops.concatenate([*rows.values(), inputs["age"]], -1)
    scores = keras.layers.Dense(2, name="score")(keras.layers.BatchNormalization()(joined))
    return keras.Model(inputs, {"score": scores, "vector": rows["watched"]})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Array]]:
    """A checkpoint, and what its model computes of INPUTS."""
    keras.utils.set_random_seed(4)
    model = build()
    for weight in model.weights:
        if weight.dtype == "float32":
            weight.assign(np.random.default_rng(len(weight.path)).uniform(0.5, 1.5, weight.shape))
    ragged = tf.ragged.boolean_mask(tf.constant(IDS), IDS >= 0)
    outputs = model({**{name: tf.constant(value) for name, value in INPUTS.items()}, "watched": ragged}, training=False)
    path = tf.train.Checkpoint(model=model).write(str(tmp_path_factory.mktemp("ckpt") / "ckpt"))
    return path, {name: value.numpy() for name, value in outputs.items()}


@pytest.fixture(scope="module")
def version(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_dir = tmp_path_factory.mktemp("exported") / "m"
    return Path(str(export_saved_model(trained[0], model_dir, model=build, layout="mmap", workers=1).path))


def check(found: Mapping[str, Any], truth: Mapping[str, Array]) -> None:
    assert set(found) == set(truth)
    for name, values in truth.items():
        np.testing.assert_allclose(np.array(found[name]), values, rtol=1e-5, atol=1e-5, err_msg=name)


def check_loaders(version: Path, truth: Mapping[str, Array]) -> None:
    """TensorFlow's two, which map from where the graph says."""
    check(capi.predict(version, INPUTS), truth)
    model = tf.saved_model.load(str(version))  # a mapped table lives as long as it
    check(model.signatures["serving_default"](**{name: tf.constant(value) for name, value in INPUTS.items()}), truth)


def check_server(model_dir: Path, log: Path, truth: Mapping[str, Array]) -> None:
    with ServerProcess(model_dir, log) as server:
        server.wait_for(1)
        status, reply = server.predict({"inputs": {name: value.tolist() for name, value in INPUTS.items()}})
        assert status == 200, reply
        check(reply["outputs"], truth)
        assert server.stop() == 0


@pytest.mark.nightly
def test_every_loader(version: Path, trained: Any, tmp_path: Path) -> None:
    manifest = Manifest.read(version)
    assert manifest is not None
    assert (manifest.layout, len(manifest.stacks)) == ("mmap", 2)
    check_loaders(version, trained[1])
    check_server(version.parent, tmp_path / "log", trained[1])


@pytest.mark.nightly
def test_moved_and_relocated(version: Path, trained: Any, tmp_path: Path) -> None:
    moved = tmp_path / "else where" / "1"
    shutil.copytree(version.parent, tmp_path / "m")
    moved.parent.mkdir()
    (tmp_path / "m" / "1").rename(moved)
    check_server(moved.parent, tmp_path / "log", trained[1])
    done = run_command("relocate", moved, moved.parent, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["changed"]
    shutil.rmtree(tmp_path / "m")
    graph = (moved / "saved_model.pb").read_bytes()
    assert str(moved).encode() in graph
    assert str(version).encode() not in graph
    check_loaders(moved, trained[1])
    assert run_command("verify", moved).returncode == 0


@pytest.mark.nightly
def test_for_another_root(trained: Any, tmp_path: Path) -> None:
    """As the command makes it, of a model named on the command line."""
    root = tmp_path / "srv"
    options = ["--model", "tests.e2e.test_export_mmap_models:build", "--layout", "mmap", "--serving-root", str(root)]
    done = run_command("export", trained[0], tmp_path / "m", *options)
    assert done.returncode == 0, done.stderr
    with pytest.raises(capi.TensorFlowError, match="No such file"):
        capi.predict(tmp_path / "m" / "1", INPUTS)
    shutil.copytree(tmp_path / "m", root)
    shutil.rmtree(tmp_path / "m")
    check_loaders(root / "1", trained[1])
