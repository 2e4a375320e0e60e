"""Programs written for TensorFlow Recommenders and keras-rs, their imports changed: they run, train, restore and serve."""

import ast
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tpuembed import open_checkpoint

pytestmark = pytest.mark.nightly

EXAMPLES = Path(__file__).parents[2] / "examples"


@functools.cache
def ratings(replicas: int) -> Any:
    return run(Path.cwd(), "keras_rs_ratings.py", "--replicas", str(replicas))


def run(folder: Path, *command: str) -> Any:
    script, *arguments = command
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments], cwd=folder, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return ast.literal_eval(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tfrs")
    return folder, run(folder, "tfrs_training.py", "out")


def test_tfrs_steps_train(trained: tuple[Path, Any]) -> None:
    _, accuracy = trained
    assert set(accuracy) == {"functional", "subclass", "separate"}
    assert accuracy["separate"] > 0.9


def test_tfrs_checkpoints_hold_tables_and_slots(trained: tuple[Path, Any]) -> None:
    with open_checkpoint(trained[0] / "out") as checkpoint:
        tables = checkpoint.tables()
        assert {name: (info.rows, info.dim, info.slots) for name, info in tables.items()} == {
            "users": (40, 8, ("accumulators",)),
            "videos": (60, 8, ("accumulators",)),
        }
        assert (checkpoint.read("videos", 0, 60, "accumulators") > 0.1).any()


def test_tfrs_serving_answers_with_the_trained_rows(trained: tuple[Path, Any]) -> None:
    folder, _ = trained
    ids = [5, 0, 59]
    examples = [
        tf.train.Example(
            features=tf.train.Features(
                feature={"candidate": tf.train.Feature(int64_list=tf.train.Int64List(value=[each]))}
            )
        ).SerializeToString()
        for each in ids
    ]
    signature = tf.saved_model.load(str(folder / "out" / "served")).signatures["serving"]
    answers = signature(examples=tf.constant(examples))
    assert list(answers) == ["candidate"]
    with open_checkpoint(folder / "out") as checkpoint:
        np.testing.assert_array_equal(answers["candidate"], checkpoint.read("videos", 0, 60)[ids])


@pytest.mark.parametrize("replicas", [1, 2])
def test_keras_rs_fit_and_evaluate(replicas: int) -> None:
    found = ratings(replicas)
    assert found["last_epoch"] < 0.8 * found["first_epoch"]
    assert found["table_moved"] > 0.01
    assert found["root_mean_squared_error"] ** 2 == pytest.approx(found["loss"], rel=1e-4)


def test_keras_rs_replicas_train_the_same_model() -> None:
    assert ratings(2)["last_epoch"] == pytest.approx(ratings(1)["last_epoch"], rel=1e-3)
