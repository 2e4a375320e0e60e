"""The proof: all cells through all stages, controls and broken variants with them."""

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.tpu import broken, stages
from tests.tpu.cells import DLRM_CELLS, NO_LOOP, Cell
from tests.tpu.checks import failures
from tests.tpu.controls import controls_of

__all__ = ["Proof", "problems"]

Results = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Proof:
    """What is run, and where its files lie.

    Attributes:
        cells: the steps that must compile.
        dlrm: larger ones, for their memory.
        broken: variants that a check must catch.
        processes: of a stage, at a time.
    """

    folder: Path
    cells: Sequence[Cell]
    dlrm: Sequence[Cell] = DLRM_CELLS
    broken: Sequence[Cell] = dataclasses.field(default_factory=broken.cells)
    processes: int = 2

    def results(self) -> dict[str, Any]:
        """Everything that the document says."""
        began = time.perf_counter()
        self.folder.mkdir(parents=True, exist_ok=True)
        steps = [*self.cells, *self.dlrm]
        failed: dict[str, str] = {}
        lowered = self._stage(stages.LOWER, self._stage(stages.TRACE, [*steps, *self.broken, NO_LOOP], failed), failed)
        checked = {cell.name: self._failures(cell) for cell in lowered}
        good = [cell for cell in steps if cell in lowered and not checked.get(cell.name)]
        compiled = stages.run(stages.COMPILE, good, self.folder, self.processes)
        failed |= {name: one["error"] for name, one in compiled.items() if not one["ok"]}
        failed |= {cell.name: found for cell in good if (found := _elsewhere(cell, compiled[cell.name]))}
        failed |= {cell.name: str(checked[cell.name]) for cell in steps if checked.get(cell.name)}
        return {
            "cells": self.cells,
            "compiled": compiled,
            "no_loop": failed.pop(NO_LOOP.name, ""),
            "broken": {cell.broken: _caught(cell, checked, failed) for cell in self.broken},
            "controls": self._controls(good),
            "failures": failed,
            "seconds": round(time.perf_counter() - began),
        }

    def _stage(self, stage: stages.Stage, cells: Sequence[Cell], failed: dict[str, str]) -> list[Cell]:
        results = stages.run(stage, cells, self.folder, self.processes)
        failed |= {name: one["error"] for name, one in results.items() if not one["ok"]}
        return stages.surviving(results, cells)

    def _failures(self, cell: Cell) -> dict[str, str]:
        lowered = stages.result_of(stages.LOWER, cell, self.folder)
        texts = [(self.folder / f"{cell.name}.{name}.mlir").read_text() for name in lowered["programs"]]
        return failures(cell, texts, (self.folder / f"{cell.name}.bridged.mlir").read_text())

    def _controls(self, cells: Sequence[Cell]) -> list[tuple[Cell, dict[str, str]]]:
        """(a cell, control -> refusal), a cell for each chip and path."""
        plain = {_where(cell): cell for cell in reversed(cells) if _takes_controls(cell)}
        chosen = [plain[where] for where in dict.fromkeys(map(_where, cells)) if where in plain]
        results = stages.run(stages.CONTROL, chosen, self.folder, 1)
        return [(cell, results[cell.name].get("refusals", {})) for cell in chosen]


def _takes_controls(cell: Cell) -> bool:
    return cell.replicas == 1 and cell.training and not cell.pipelining and cell.tables != "dlrm"


def _elsewhere(cell: Cell, compiled: Mapping[str, Any]) -> str:
    """Whether SparseCores are used where they must not be, or not where they must."""
    starts = sum(program["sparse_core_starts"] for program in compiled.get("programs", {}).values())
    if not compiled["ok"] or bool(starts) == (cell.path == "sparsecore"):
        return ""
    return f"{starts} starts on SparseCores, with tables {cell.path}"


def _caught(cell: Cell, checked: Mapping[str, Mapping[str, str]], failed: dict[str, str]) -> str:
    """Which checks caught a variant; where it is not even lowered, no check did."""
    error = failed.pop(cell.name, "")
    return ", ".join(f"`{check}`" for check in checked.get(cell.name, {})) or f"NO {error}".strip()


def problems(results: Mapping[str, Any]) -> list[str]:
    """Why the proof does not hold, a sentence each."""
    found = [f"{name}: {error}" for name, error in results["failures"].items()]
    for name, one in broken.BROKEN.items():
        caught = results["broken"].get(name)
        if caught is not None and f"`{one.check}`" not in caught:
            found.append(f"broken variant {name} is not caught by {one.check}: {caught}")
    for cell, refusals in results["controls"]:
        for control in controls_of(cell.path):
            if not re.search(control.says, refusals.get(control.name, "")):
                found.append(f"{cell.chip}: {control.name} is not refused as expected: {refusals.get(control.name)!r}")
    uncontrolled = {_where(cell) for cell in results["cells"]} - {_where(cell) for cell, _ in results["controls"]}
    found += [f"{' '.join(where)}: no control was tried" for where in sorted(uncontrolled)]
    if "while body" not in results["no_loop"]:
        found.append(f"pipelining without a loop is not refused as expected: {results['no_loop']!r}")
    return found


def _where(cell: Cell) -> tuple[str, str]:
    return cell.chip, cell.path
