"""The negative controls, compiled. In jax's environment."""

import json
import re
from pathlib import Path
from typing import Any

from tests.tpu.cells import Cell
from tests.tpu.compiling import build
from tests.tpu.controls import Control, controls_of
from tests.tpu.jobs import result_file, serve

__all__ = ["controls"]


def controls(cell: Cell, folder: Path) -> dict[str, Any]:
    """Control -> the compiler's words, or "" where it took what it must refuse."""
    [program] = json.loads(result_file(folder, cell, "lower").read_text())["programs"]
    text = (folder / f"{cell.name}.{program}.mlir").read_text()
    return {"refusals": {control.name: _refusal(control, cell, text) for control in controls_of(cell.path)}}


def _refusal(control: Control, cell: Cell, text: str) -> str:
    changed = control.change(text)
    if changed == text and control.topology is None:
        raise ValueError(f"control {control.name!r} changes nothing")
    try:
        build(changed, control.topology or cell.hardware.topology, cell.replicas)
    except Exception as error:
        return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:300]
    return ""


if __name__ == "__main__":
    serve(controls)
