"""A few cells of the proof, a broken variant of each path and the controls, where the environments are there."""

from pathlib import Path

import pytest

from tests.tpu import broken
from tests.tpu.cells import Cell
from tests.tpu.environments import ENVIRONMENTS
from tests.tpu.numbers.running import skip_without
from tests.tpu.proof import Proof, problems

SAMPLE = (
    Cell("v5p", "sparsecore", "Adagrad", weighted=True),
    Cell("v5p", "sparsecore", "Adam", tables="one", pipelining=True),
    Cell("v5e", "replicated", "FTRL", tables="one"),
    Cell("v5e", "replicated", "FTRL", tables="one", replicas=4),
)
BROKEN = ("dropped_gradient", "swapped_ids", "own_gradients")


@pytest.mark.timeout(1200)
def test_a_sample_of_the_proof(tmp_path: Path) -> None:
    skip_without(*ENVIRONMENTS)
    variants = [cell for cell in broken.cells() if cell.broken in BROKEN]
    results = Proof(tmp_path, SAMPLE, dlrm=(), broken=variants).results()
    assert problems(results) == []
    assert set(results["broken"]) == set(BROKEN)
    assert [cell.chip for cell, _ in results["controls"]] == ["v5p", "v5e"]
