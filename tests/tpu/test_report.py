"""The document, from made-up results."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.tpu import shims
from tests.tpu.broken import BROKEN
from tests.tpu.cells import COVERING, DLRM_CELLS, Cell
from tests.tpu.checks import CHECKS
from tests.tpu.controls import CONTROLS, CONTROLS_OF_COPIES
from tests.tpu.host import check_buffers_of_hosts, check_stamps_of_host
from tests.tpu.proof import problems
from tests.tpu.report import SENTENCE, rendered

ROOT = Path(__file__).resolve().parents[2]
REFUSALS = {
    control.name: words
    for control, words in zip(
        CONTROLS,
        ["not SparseDenseMatmulOp calls", "max_ids_per_partition (0)", "E3001", "sharding", "mixed device type"],
        strict=True,
    )
}
REFUSALS_OF_COPIES = {control.name: "unknown custom call Nobody" for control in CONTROLS_OF_COPIES}
CONTROLLED = {(cell.chip, cell.path): cell for cell in COVERING}


def refused(**changes: str) -> list[tuple[Cell, dict[str, str]]]:
    """Of every chip and path; `changes` of the last one with SparseCores."""
    of_path = {"sparsecore": REFUSALS, "replicated": REFUSALS_OF_COPIES}
    found = [(cell, dict(of_path[cell.path])) for cell in CONTROLLED.values()]
    [*_, last] = [refusals for cell, refusals in found if cell.path == "sparsecore"]
    last.update(changes)
    return found


def results(**changes: Any) -> dict[str, Any]:
    facts = {
        "memory": dict.fromkeys(("generated_code", "argument", "output", "alias", "temp", "peak"), 1024),
        "sparse_core_starts": 2,
    }
    return {
        "cells": COVERING,
        "compiled": {cell.name: {"programs": {"_func": facts}} for cell in [*COVERING, *DLRM_CELLS]},
        "failures": {},
        "controls": refused(),
        "no_loop": "unable to find while body user",
        "broken": {name: f"`{one.check}`" for name, one in BROKEN.items()},
        "seconds": 1,
        **changes,
    }


def test_a_proof_that_holds() -> None:
    assert problems(results()) == []


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"failures": {COVERING[0].name: "E1000: no room"}}, f"{COVERING[0].name}: E1000: no room"),
        ({"broken": {"dropped_gradient": "NO"}}, "dropped_gradient is not caught by number_of_updates: NO"),
        ({"controls": refused(**{"max_ids = 0": ""})}, "v6e: max_ids = 0 is not refused as expected: ''"),
        ({"controls": refused()[1:]}, "v5p sparsecore: no control was tried"),
        ({"no_loop": ""}, "pipelining without a loop is not refused"),
    ],
)
def test_a_proof_that_fails_says_why(changes: dict[str, Any], match: str) -> None:
    [found] = problems(results(**changes))
    assert match in found
    assert rendered(results(**changes)) != rendered(results())


@pytest.mark.parametrize("page", ["README.md", "docs/layer.md", "docs/tpu-proof.md"])
def test_the_same_sentence_everywhere(page: str) -> None:
    assert SENTENCE in re.sub(r"\s+", " ", (ROOT / page).read_text())


@pytest.mark.parametrize(
    "text", [(ROOT / "docs" / "tpu-proof.md").read_text(), rendered(results())], ids=["page", "report"]
)
def test_every_test_that_the_pages_name_is_there(text: str) -> None:
    named = set(re.findall(r"\btests/[\w/.]*\w", text))
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_report_has_every_cell_control_and_variant() -> None:
    report = rendered(results())
    wanted = [*BROKEN, *(control.name for control in (*CONTROLS, *CONTROLS_OF_COPIES)), *shims.SHIMS]
    assert [name for name in wanted if name not in report] == []
    assert not re.search("FAILED|ACCEPTED|not run|NO \\|", report)


def test_the_page_has_the_numbers_of_the_report() -> None:
    page = (ROOT / "docs" / "tpu-proof.md").read_text()
    checks = {check for of_path in CHECKS.values() for check in of_path} | {
        check_buffers_of_hosts,
        check_stamps_of_host,
    }
    numbers = [
        f"{len(COVERING)} steps",
        f"{len(shims.SHIMS)} shims",
        f"{len(checks)} checks",
        f"{len(BROKEN)} variants of the layer",
    ]
    assert [number for number in numbers if number not in page] == []
    steps = Counter((cell.chip, "replicated" if cell.path == "replicated" else "on SparseCores") for cell in COVERING)
    rows = [f"| {chip} | {tables} | 1 and 4 | {count} |" for (chip, tables), count in steps.items()]
    assert [row for row in rows if row not in page] == []
