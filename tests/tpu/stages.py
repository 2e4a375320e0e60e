"""Runs the stages of the proof, each in processes of its own environment, under a time limit."""

import dataclasses
import json
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tests.tpu import child
from tests.tpu.cells import Cell
from tests.tpu.environments import JAX, REPOSITORY, TENSORFLOW_TPU, Environment
from tests.tpu.jobs import result_file

__all__ = ["COMPILE", "CONTROL", "LOWER", "NO_TPU", "TRACE", "Stage", "result_of", "run", "surviving"]

# libtpu asks the cloud which TPU it is on, for minutes, unless it is told.
NO_TPU: Final[Mapping[str, str]] = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
"""For all stages."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A module that reads cells from stdin and writes a result for each.

    Attributes:
        name: of the results.
        seconds_per_cell: beside a start of `_START_SECONDS`.
        variables: of its processes' environment.
    """

    name: str
    environment: Environment
    module: str
    seconds_per_cell: int
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


TRACE: Final = Stage("trace", TENSORFLOW_TPU, "tests.tpu.trace", 30, {"TPU_LIBRARY_PATH": "/nonexistent.so"})
LOWER: Final = Stage("lower", TENSORFLOW_TPU, "tests.tpu.lower", 30)
COMPILE: Final = Stage("compiled", JAX, "tests.tpu.compiling", 180)
CONTROL: Final = Stage("controls", JAX, "tests.tpu.controlling", 180)
_START_SECONDS = 600  # a machine may be busy


def run(stage: Stage, cells: Sequence[Cell], folder: Path, processes: int = 2) -> dict[str, dict[str, Any]]:
    """Cell -> the result of `stage`: {"ok", "seconds"} and "error", or what the stage says."""
    print(f"{stage.name}: {len(cells)} cells", flush=True)
    shares = [share for share in (list(cells[first::processes]) for first in range(processes)) if share]
    with ThreadPoolExecutor(max(1, len(shares))) as pool:
        list(pool.map(lambda share: _run_share(stage, share, folder), shares))
    return {cell.name: json.loads(result_file(folder, cell, stage.name).read_text()) for cell in cells}


def surviving(results: Mapping[str, Mapping[str, Any]], cells: Sequence[Cell]) -> list[Cell]:
    """The cells that got through."""
    return [cell for cell in cells if results[cell.name]["ok"]]


def _run_share(stage: Stage, cells: list[Cell], folder: Path) -> None:
    """Until every cell has a result; one that ends the process gets that as its result, and the rest another process."""
    for cell in cells:
        result_file(folder, cell, stage.name).unlink(missing_ok=True)
    left = cells
    while left:
        ended = _process(stage, left, folder)
        left = [cell for cell in left if not result_file(folder, cell, stage.name).exists()]
        if left:
            failed = {"ok": False, "error": ended, "seconds": 0.0, "cell": dataclasses.asdict(left[0])}
            result_file(folder, left[0], stage.name).write_text(json.dumps(failed))
            left = left[1:]


def _process(stage: Stage, cells: Sequence[Cell], folder: Path) -> str:
    """How a process that ran `cells` ended."""
    limit = _START_SECONDS + stage.seconds_per_cell * len(cells)
    try:
        done = subprocess.run(
            child.command(stage.environment.python, stage.module, str(folder)),
            cwd=REPOSITORY,
            env=child.variables(NO_TPU, {"PYTHONPATH": str(REPOSITORY)}, stage.variables),
            input=json.dumps([dataclasses.asdict(cell) for cell in cells]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{stage.module}: no end after {limit} seconds"
    return f"{stage.module} ended with {done.returncode}: {done.stderr[-800:].strip()}"


def result_of(stage: Stage, cell: Cell, folder: Path) -> dict[str, Any]:
    """What `stage` said of `cell`."""
    result: dict[str, Any] = json.loads(result_file(folder, cell, stage.name).read_text())
    return result
