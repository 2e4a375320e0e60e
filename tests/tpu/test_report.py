"""The document, from made-up results."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.tpu.broken import BROKEN
from tests.tpu.cells import COVERING, DLRM_CELLS
from tests.tpu.controls import CONTROLS
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


def results(**changes: Any) -> dict[str, Any]:
    facts = {
        "memory": dict.fromkeys(("generated_code", "argument", "output", "alias", "temp"), 1024),
        "sparse_core_calls": 2,
    }
    return {
        "cells": COVERING,
        "compiled": {cell.name: {"programs": {"_func": facts}} for cell in [*COVERING, *DLRM_CELLS]},
        "failures": {},
        "controls": {"v5p": REFUSALS},
        "no_loop": "unable to find while body user",
        "broken": {name: f"`{one.check}`" for name, one in BROKEN.items()},
        "others": [("stale_row", "a row is stale", "numbers")],
        "seconds": 1,
        **changes,
    }


def test_only_the_time_differs() -> None:
    first, second = rendered(results()), rendered(results(seconds=2))
    different = [(a, b) for a, b in zip(first.splitlines(), second.splitlines(), strict=True) if a != b]
    assert different == [("Wall time of the last run: 1 seconds.", "Wall time of the last run: 2 seconds.")]
    assert SENTENCE in first


def test_a_proof_that_holds() -> None:
    assert problems(results()) == []


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"failures": {COVERING[0].name: "E1000: no room"}}, f"{COVERING[0].name}: E1000: no room"),
        ({"broken": {"dropped_gradient": "NO"}}, "dropped_gradient is not caught by number_of_updates: NO"),
        ({"controls": {"v6e": {**REFUSALS, "max_ids = 0": ""}}}, "v6e: max_ids = 0 is not refused as expected: ''"),
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
