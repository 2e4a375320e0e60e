"""MirroredStrategy: one update of the gradients of all replicas together, in every copy."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.support.layer import replicas
from tests.support.layer.models import OPTIMIZERS, Reference, assert_same_numbers, one_table
from tests.support.messages import refused
from tpuembed import TPUEmbedding
from tpuembed.errors import TrainingError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


# Replicas, and how many optimizers they train with: one of each kind, or all.
KINDS, ALL = 5, len(OPTIMIZERS)
LONG = [(1, KINDS), (4, KINDS), (1, ALL), (2, ALL), (4, ALL)]
RUNS = [(2, KINDS), *(pytest.param(run, marks=pytest.mark.long) for run in LONG)]


@pytest.fixture(scope="module", params=RUNS, ids=str)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, int, Path]:
    folder = tmp_path_factory.mktemp("replicas")
    number, optimizers = request.param
    command = [sys.executable, "-m", "tests.support.layer.replicas", str(number), str(folder), str(optimizers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return number, optimizers, folder


@pytest.mark.sampled(1)
def test_every_optimizer_equals_the_reference_in_every_copy(trained: tuple[int, int, Path]) -> None:
    number, optimizers, folder = trained
    assert len({type(optimizer) for optimizer in list(OPTIMIZERS.values())[:KINDS]}) == KINDS
    ids = np.array([i for row in replicas.IDS for i in row])
    gradients = np.array([replicas.SLOPES[e] for e, row in enumerate(replicas.IDS) for _ in row], np.float64)
    for index, (kind, optimizer) in enumerate(list(OPTIMIZERS.items())[:optimizers]):
        with np.load(folder / f"{index}.npz") as found:
            reference = Reference(found["before"], optimizer)
            for _ in range(replicas.STEPS):
                reference.step(ids, gradients)
            for name, truth in {"table": reference.table, **reference.slots}.items():
                assert len(found[name]) == number
                for copy in found[name]:
                    np.testing.assert_array_equal(copy, found[name][0], err_msg=f"{kind}: {name}")
                assert_same_numbers(found[name][0], truth, f"{kind}: {name}")


FIT: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = {}


@pytest.mark.parametrize("model", ["fit", "fit_padded"])
def test_fit_gives_the_same_numbers_on_any_number_of_replicas(trained: tuple[int, int, Path], model: str) -> None:
    number, _, folder = trained
    with np.load(folder / f"{model}.npz") as found:
        for name in ("loss", "table"):
            values = found[name] if name == "loss" else found[name][0]
            np.testing.assert_allclose(values, FIT.setdefault(f"{model} {name}", values), rtol=1e-5, atol=1e-6)
        assert number == len(found["table"])


def test_training_under_another_strategy_than_the_layers_is_refused() -> None:
    layer = TPUEmbedding(one_table(), optimizer="sgd")
    inputs = {"first": tf.constant([1]), "second": tf.constant([2])}

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(inputs)["first"])
        tape.gradient(loss, layer.trainable_variables)

    with refused(TrainingError, match="1 replica"):
        tf.distribute.OneDeviceStrategy("CPU:0").run(step)
    assert issubclass(TrainingError, RuntimeError)
