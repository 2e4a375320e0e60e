"""The models of examples/criteo.py, small: trained, resumed, exported and served with the numbers of training."""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from examples import criteo
from tests.support.contract_serve import Server, assert_near, config_of, eventually, outputs_of, predict_request
from tests.support.export.in_process import exports_in_this_process
from tpuembed import export_saved_model

LINES, SCALE = 2048, 0.0001


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model after two epochs, and its twin, which was saved after the first and restored into a new model.

    Attributes:
        inputs: A batch, as requests have it.
        predicted: `model.predict(inputs)`.
    """

    model: Any
    before: Mapping[str, list[float]]
    losses: Mapping[str, list[float]]
    resumed: Any
    resumed_losses: Mapping[str, list[float]]
    checkpoint: str
    inputs: Mapping[str, npt.NDArray[Any]]
    predicted: npt.NDArray[np.float32]


def build(name: str) -> Any:
    model = criteo.build(name, SCALE)
    model.compile("adam", "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    return model


def train(name: str, data: Any, folder: Path) -> Trained:
    """Train, and resume from what the docs recommend: a TensorFlow checkpoint, a .keras file, or Keras' backup."""
    keras.utils.set_random_seed(1)
    model, options, callbacks = build(name), {"shuffle": False, "verbose": 0}, []
    saves = keras.callbacks.ModelCheckpoint(folder / "model.keras")
    backs_up = keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
    before = model.fit(data, epochs=1, callbacks=[saves, backs_up], **options).history
    tf.train.Checkpoint(model=model).write(str(folder / "first"))
    losses = model.fit(data, epochs=2, initial_epoch=1, **options).history

    if name == "dlrm":
        resumed = build(name)
        resumed.optimizer.build(resumed.trainable_variables)
        tf.train.Checkpoint(model=resumed).read(str(folder / "first")).assert_consumed()
    elif name == "dcn":
        resumed = keras.models.load_model(folder / "model.keras")
    else:
        resumed, callbacks = build(name), [keras.callbacks.BackupAndRestore(folder / "backup")]
    resumed_losses = resumed.fit(
        data, epochs=2, initial_epoch=0 if callbacks else 1, callbacks=callbacks, **options
    ).history

    inputs = {alias: value.numpy() for alias, value in next(iter(data))[0].items()}
    predicted = model.predict({alias: tf.constant(value) for alias, value in inputs.items()}, verbose=0)
    checkpoint = tf.train.Checkpoint(model=model).write(str(folder / "trained"))
    return Trained(model, before, losses, resumed, resumed_losses, checkpoint, inputs, predicted)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real_models")


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Trained]:
    criteo.generate(folder / "log.tsv", LINES, SCALE)
    found = {}
    for name in criteo.MODELS:
        (folder / f"{name}_training").mkdir()
        found[name] = train(name, criteo.read(folder / "log.tsv", 0, LINES), folder / f"{name}_training")
    return found


@pytest.fixture(scope="module")
def server(trained: dict[str, Trained], folder: Path) -> Iterator[Server]:
    """One server of all models, whole and as lookups."""
    with exports_in_this_process():
        for name, each in trained.items():
            export_saved_model(each.checkpoint, folder / name, model=lambda name=name: criteo.build(name, SCALE))
            export_saved_model(each.checkpoint, folder / f"{name}_lookups")
    config = folder / "models.config"
    config.write_text(config_of(folder, dict.fromkeys([*trained, *(f"{name}_lookups" for name in trained)], "")))
    with Server(None, folder / "log", "--config", str(config)) as started:
        eventually(started.is_ready)
        yield started


def answers(server: Server, model: str, inputs: Mapping[str, npt.NDArray[Any]]) -> Iterator[dict[str, Any]]:
    """Ask over REST and over gRPC."""
    columns = {alias: values.astype(str) if values.dtype == object else values for alias, values in inputs.items()}
    reply = server.post(f"{model}:predict", {"inputs": {alias: values.tolist() for alias, values in columns.items()}})
    assert reply.status == 200, reply.value
    outputs = reply.value["outputs"]
    yield outputs if isinstance(outputs, dict) else {"click": outputs}  # REST has no name for the only output
    yield outputs_of(server.prediction.Predict(predict_request(model, inputs), timeout=60))


@pytest.mark.parametrize("name", criteo.MODELS)
def test_a_resumed_model_trains_on_as_if_never_stopped(trained: dict[str, Trained], name: str) -> None:
    found = trained[name]
    assert found.resumed is not found.model
    for metric, (value,) in found.losses.items():
        assert found.resumed_losses[metric] == pytest.approx([value], rel=1e-6), metric
    for weight, resumed in zip(found.model.weights, found.resumed.weights, strict=True):
        np.testing.assert_allclose(resumed, weight, rtol=1e-5, atol=1e-6, err_msg=weight.path)
    assert found.losses["loss"] < found.before["loss"], "it learns"


@pytest.mark.parametrize("name", criteo.MODELS)
def test_a_served_model_answers_what_predict_says(trained: dict[str, Trained], server: Server, name: str) -> None:
    for outputs in answers(server, name, trained[name].inputs):
        assert_near(outputs, {"click": trained[name].predicted})


@pytest.mark.parametrize("name", criteo.MODELS)
def test_served_lookups_answer_the_trained_rows(trained: dict[str, Trained], server: Server, name: str) -> None:
    found = trained[name]
    hashed = {alias: np.array(found.model.get_layer(f"hash_{alias}")(found.inputs[alias])) for alias in criteo.COLUMNS}
    ids, wanted = dict[str, Any](), dict[str, Any]()
    for layer, prefix in [("embedding", ""), ("wide", "wide_")][: 2 if name == "wide_deep" else 1]:
        of_layer = {f"{prefix}{alias}": rows for alias, rows in hashed.items()}
        ids |= {feature: rows[:, None] for feature, rows in of_layer.items()}  # lists of one id each
        wanted |= {feature: np.array(rows) for feature, rows in found.model.get_layer(layer)(of_layer).items()}
    for outputs in answers(server, f"{name}_lookups", ids):
        assert_near(outputs, wanted)


def test_the_example_names_a_line_that_is_not_of_the_format(tmp_path: Path) -> None:
    file = tmp_path / "train.txt"
    criteo.generate(file, 100, SCALE)
    assert criteo.count_lines(file) == 100
    lines = file.read_text().splitlines(keepends=True)
    for content, said in (
        ([*lines, "\n"], "line 101: 1 fields"),
        ([*lines[:7], lines[7].rstrip("\n") + "\t\n", *lines[8:]], "line 8: 41 fields"),
        (lines[:9], "has 9 lines"),
        ([], "has 0 lines"),
    ):
        file.write_text("".join(content))
        with pytest.raises(SystemExit, match=said):
            criteo.count_lines(file)


@pytest.mark.nightly
def test_the_example_takes_a_file_and_bfloat16(tmp_path: Path) -> None:
    criteo.generate(tmp_path / "train.txt", LINES, SCALE)
    options = [
        "--data",
        "train.txt",
        "--model",
        "dcn",
        "--dtype",
        "mixed_bfloat16",
        "--epochs",
        "1",
        "--scale",
        str(SCALE),
    ]
    done = subprocess.run(
        [sys.executable, criteo.__file__, *options], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Warning" not in done.stderr
    (difference,) = re.findall(r"differ from model.predict by (\S+) at most", done.stdout)
    assert float(difference) < 0.02  # bfloat16 has three digits
