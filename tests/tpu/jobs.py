"""What the process of a stage does: its cells one after another, each with a result of its own in JSON.

A cell that raises is a result too; one that ends the process has none, which `stages` notices.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tpu.cells import Cell

__all__ = ["Stage", "result_file", "serve"]

Stage = Callable[[Cell, Path], dict[str, Any]]
_ERROR_CHARACTERS = 1500


def result_file(folder: Path, cell: Cell, stage: str) -> Path:
    """Where the result of `stage` is written."""
    return folder / f"{cell.name}.{stage}.json"


def serve(stage: Stage) -> None:
    """Run `stage` for the cells of `python -m MODULE FOLDER`, a JSON list of them on stdin."""
    folder = Path(sys.argv[1])
    for values in json.load(sys.stdin):
        cell = Cell.of(values)
        began = time.perf_counter()
        try:
            result = {"ok": True, **stage(cell, folder)}
        except Exception as error:
            result = {"ok": False, "error": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]}
        result["seconds"] = round(time.perf_counter() - began, 2)
        result_file(folder, cell, stage.__name__).write_text(json.dumps({**result, "cell": dataclasses.asdict(cell)}))
