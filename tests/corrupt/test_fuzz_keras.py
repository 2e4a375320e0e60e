"""Mutated weight files of Keras: see keras_fuzzer.py."""

import collections
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

GOLDENS = Path(__file__).parents[1] / "golden" / "keras_rs"
TARGETS = {
    ".weights.h5": [("subclassed_h5", "sub.weights.h5")],
    ".keras": [("keras_unsure", "model.keras")],
    ".weights.json": [("sharded", "model.weights.json"), ("sharded", "model_00000.weights.h5")],
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where the system has such a place: every execution writes a file."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


def fuzz(golden: str, changed: str, folder: Path, count: int) -> collections.Counter[str]:
    """The outcomes of `count` executions; an execution that ends the process is counted, and the next one goes on."""
    outcomes: collections.Counter[str] = collections.Counter()
    first, batch = 0, 2_000
    while first < count:
        last = min(count, first + batch)
        command = [sys.executable, "-m", "tests.support.checkpoint.keras_fuzzer", GOLDENS / golden, changed, folder]
        done = subprocess.run(
            [*map(str, command), str(first), str(last)], capture_output=True, text=True, cwd=Path(__file__).parents[2]
        )
        ended = collections.Counter[str](json.loads((folder / "progress").read_text()))
        outcomes.update(ended)
        first += ended.total()
        if done.returncode:
            assert done.returncode < 0, (
                done.stderr
            )  # killed by a signal, as the HDF5 library does not survive every file
            outcomes[f"killed by {signal.Signals(-done.returncode).name}"] += 1
            first += 1
    return outcomes


@pytest.mark.parametrize("ending", TARGETS)
def test_sixty_mutations_are_refused_or_read(ending: str, folder: Path) -> None:
    for number, (golden, changed) in enumerate(TARGETS[ending]):
        (folder / str(number)).mkdir()
        outcomes = fuzz(golden, changed, folder / str(number), 60)
        assert outcomes.total() == 60
        assert outcomes["CheckpointCorruptError"] > 4
