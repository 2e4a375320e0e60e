"""The cells of the proof cover what they say."""

import collections
import itertools
from typing import Any

import pytest

from tests.tpu.broken import BROKEN
from tests.tpu.broken import cells as broken_cells
from tests.tpu.cells import CHIPS, COVERING, SMALL, Cell
from tests.tpu.checks import CHECKS
from tests.tpu.host import check_buffers_of_hosts, check_stamps_of_host

OPTIMIZERS = {"SGD", "Adagrad", "AdagradMomentum", "Adam", "FTRL"}
VALUES: dict[str, set[Any]] = {
    "optimizer": OPTIMIZERS,
    "tables": set(SMALL),
    "combiner": {"sum", "mean", "sqrtn"},
    "weighted": {False, True},
    "training": {False, True},
    "pipelining": {False, True},
    "replicas": {1, 4},
}


def values(path: str, option: str) -> set[Any]:
    """Tables that are replicated have no pipelined steps."""
    return {False} if (path, option) == ("replicated", "pipelining") else VALUES[option]


def cells_of(path: str, **fixed: Any) -> list[Cell]:
    return [cell for cell in COVERING if cell.path == path and all(getattr(cell, k) == v for k, v in fixed.items())]


@pytest.mark.parametrize(("chip", "path"), list(CHIPS))
@pytest.mark.parametrize("option", VALUES)
def test_every_value_of_every_option_with_every_chip(chip: str, path: str, option: str) -> None:
    assert {getattr(cell, option) for cell in cells_of(path, chip=chip)} == values(path, option)


@pytest.mark.parametrize("path", ["sparsecore", "replicated"])
@pytest.mark.parametrize(
    ("option", "replicas"), list(itertools.product([option for option in VALUES if option != "replicas"], [1, 4]))
)
def test_every_value_of_every_option_with_every_number_of_replicas(path: str, option: str, replicas: int) -> None:
    assert {getattr(cell, option) for cell in cells_of(path, replicas=replicas)} == values(path, option)


@pytest.mark.parametrize(("chip", "path"), list(CHIPS))
def test_every_optimizer_trains_on_every_chip(chip: str, path: str) -> None:
    trained = {cell.optimizer for cell in cells_of(path, chip=chip, training=True)}
    assert trained == OPTIMIZERS


def test_names_are_of_one_cell_each() -> None:
    names = collections.Counter(cell.name for cell in [*COVERING, *broken_cells()])
    assert max(names.values()) == 1


def test_every_check_has_a_broken_variant() -> None:
    of_hosts = {check_buffers_of_hosts.__name__, check_stamps_of_host.__name__}
    checks = {check.__name__ for of_path in CHECKS.values() for check in of_path} | of_hosts
    assert {one.check for one in BROKEN.values()} == checks
    assert {one.cell.path for one in BROKEN.values()} == {"sparsecore", "replicated"}
