"""Steps whose programs libtpu compiles for minutes each: measured apart from the proof, and committed as `slow.json`.

`python -m tests.tpu --slow` measures them anew: one program at a time, each in a process of its own.
"""

import datetime as dt
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.tpu import child, stages
from tests.tpu.cells import DLRM_CELLS, SLOW_CELLS, Cell
from tests.tpu.controls import with_limits
from tests.tpu.environments import JAX, REPOSITORY, TENSORFLOW_TPU

__all__ = ["FILE", "committed", "measure", "versions"]

FILE: Final = Path(__file__).with_name("slow.json")
"""{"date", "versions", "cells": {name of a cell: {program: facts, or {"left_out": why}}},
"limits": [{"chip", "limit", "peak" or "refusal"}]}."""
_LIMITED: Final = tuple(cell for cell in DLRM_CELLS if cell.stacking and not cell.pipelining)
_LIMITS: Final = (2048, 4096, 9000)
_UNREAD: Final = ("custom_calls", "wall_seconds")
_SECONDS = 2700  # of one program; a machine may be busy


def versions() -> dict[str, str]:
    """What the numbers depend on: "<environment>: <wheel>" -> version."""
    wanted = {TENSORFLOW_TPU: ("tensorflow-tpu", "libtpu"), JAX: ("jaxlib", "libtpu")}
    return {f"{of.name}: {name}": of.pins()[name] for of, names in wanted.items() for name in names}


def committed() -> dict[str, Any]:
    """The committed measurements."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def measure(folder: Path) -> None:
    """Trace, lower and compile all, and write `FILE`.

    Raises:
        RuntimeError: a step is not lowered, or refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stage in (stages.TRACE, stages.LOWER):
        for name, result in stages.run(stage, [*SLOW_CELLS, *_LIMITED], folder).items():
            if not result["ok"]:
                raise RuntimeError(f"{stage.name} {name}: {result['error']}")
    found = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "versions": versions(),
        "cells": {cell.name: _programs(cell, folder) for cell in SLOW_CELLS},
        "limits": [_limited(cell, limit, folder) for cell in _LIMITED for limit in _LIMITS],
    }
    FILE.write_text(_text(found))


def _text(found: Mapping[str, Any]) -> str:
    """JSON with a program or a limit in each line."""
    lines = []
    for cell, programs in found["cells"].items():
        inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(facts)}" for name, facts in programs.items())
        lines.append(f" {json.dumps(cell)}: {{\n{inner}}}")
    limits = ",\n".join(f" {json.dumps(one)}" for one in found["limits"])
    head = f'{{"date": {json.dumps(found["date"])}, "versions": {json.dumps(found["versions"])},\n"cells": {{\n'
    return head + ",\n".join(lines) + '},\n"limits": [\n' + limits + "]}\n"


def _programs(cell: Cell, folder: Path) -> dict[str, Any]:
    found = {}
    for name in stages.result_of(stages.LOWER, cell, folder)["programs"]:
        found[name] = _compiled(cell, folder, name)
        if "refusal" in found[name]:
            raise RuntimeError(f"{cell.name} {name}: {found[name]['refusal']}")
    return found


def _limited(cell: Cell, limit: int, folder: Path) -> dict[str, Any]:
    [program] = stages.result_of(stages.LOWER, cell, folder)["programs"]
    text = (folder / f"{cell.name}.{program}.mlir").read_text()
    (folder / f"{cell.name}.limit-{limit}.mlir").write_text(with_limits(text, limit))
    facts = _compiled(cell, folder, f"limit-{limit}")
    outcome = {"peak": facts["memory"]["peak"]} if "memory" in facts else facts
    return {"chip": cell.chip, "limit": limit, **outcome}


def _compiled(cell: Cell, folder: Path, program: str) -> dict[str, Any]:
    print(f"slow: {cell.name} {program}", flush=True)
    text, facts = (folder / f"{cell.name}.{program}.{kind}" for kind in ("mlir", "facts.json"))
    arguments = (str(text), cell.hardware.topology, str(facts))
    try:
        subprocess.run(
            child.command(JAX.python, "tests.tpu.slow_program", *arguments),
            cwd=REPOSITORY,
            env=child.variables(stages.NO_TPU, {"PYTHONPATH": str(REPOSITORY)}),
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return {"left_out": f"stopped after {_SECONDS:,} seconds of wall time"}
    found: dict[str, Any] = json.loads(facts.read_text())
    return {name: value for name, value in found.items() if name not in _UNREAD}
