"""Saved under one strategy, restored under another, trained on: the numbers of training without a break."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.layer import resumed
from tests.support.layer.models import Reference
from tests.support.layer.replicas import IDS, SLOPES
from tpuembed import Adam

ROOT = Path(__file__).parents[3]
LONG = [pytest.param(number, marks=pytest.mark.nightly) for number in ("1", "4")]


@pytest.fixture(scope="module")
def folder(replicas: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resumed")
    command = [sys.executable, "-m", "tests.support.layer.resumed", replicas, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return path


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", resumed.WAYS)
@pytest.mark.parametrize("replicas", ["2", *LONG], scope="module")
@pytest.mark.nightly
def test_every_pair_of_strategies_equals_the_reference(folder: Path, replicas: str, how: str) -> None:
    """In float64, with the schedule's rates written out: 0.4 * 0.5^(step / 3)."""
    reference = Reference(resumed.first_rows(), Adam(epsilon=1e-2))
    ids = np.array([i for row in IDS for i in row])
    gradients = np.array([SLOPES[e] for e, row in enumerate(IDS) for _ in row], np.float64)
    for step in range(2 * resumed.STEPS):
        reference.step(ids, gradients, rate=0.4 * 0.5 ** (step / 3))
    for source, target in resumed.pairs(replicas):
        with np.load(folder / f"{source}-{target}-{how}.npz") as found:
            assert len(found["table"]) == (1 if target == "default" else int(target))
            assert (found["updates"] == 2 * resumed.STEPS).all()
            for name, truth in {"table": reference.table, **reference.slots}.items():
                for copy in found[name]:
                    np.testing.assert_allclose(copy, truth, rtol=5e-6, atol=5e-6, err_msg=f"{source}-{target}")
                    np.testing.assert_array_equal(copy, found[name][0])


@pytest.mark.parametrize("ending", resumed.ENDINGS)
@pytest.mark.parametrize("replicas", LONG, scope="module")
def test_models_in_weight_files_train_on_under_another_strategy(folder: Path, replicas: str, ending: str) -> None:
    for pair in (f"default-{replicas}", f"{replicas}-default"):
        with np.load(folder / "unbroken.npz") as truth, np.load(folder / f"{pair}-{ending}.npz") as found:
            assert (found["updates"] == 6).all()
            np.testing.assert_allclose(found["kernel"], truth["kernel"], rtol=1e-5, atol=1e-6)
            for name in ("table", *resumed.SLOTS):
                for copy in found[name]:
                    np.testing.assert_allclose(copy, truth[name][0], rtol=1e-5, atol=1e-6, err_msg=name)
