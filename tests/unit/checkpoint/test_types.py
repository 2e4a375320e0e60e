"""What the base class of all readers checks and adds, for a reader that has only what it must have."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.messages import refused
from tpuembed.checkpoint import Checkpoint, TableInfo
from tpuembed.checkpoint.saved_objects import Weight
from tpuembed.checkpoint.types import Array
from tpuembed.errors import CheckpointFormatError, ConfigError, RowRangeError, UnknownTableError

TABLE = np.arange(12, dtype=np.float16).reshape(4, 3)
SLOT = TABLE.astype(np.float32) + 100


class Small(Checkpoint):
    """One table in memory; the slot has another dtype."""

    format, path = "small", "here"

    def __init__(self) -> None:
        self._tables = {"t": TableInfo("t", 4, 3, TABLE.dtype, ("momenta",))}
        self.closed = 0

    def _dtype(self, table: str, slot: str | None) -> np.dtype[Any]:
        return TABLE.dtype if slot is None else SLOT.dtype

    def _fill(self, table: str, slot: str | None, start: int, out: Array) -> None:
        out[...] = (TABLE if slot is None else SLOT)[start : start + len(out)]

    def fingerprint(self) -> str:
        return "f"

    def close(self) -> None:
        self.closed += 1


def test_rows_are_read_by_range_and_into_arrays() -> None:
    with Small() as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("t"), TABLE)
        np.testing.assert_array_equal(checkpoint.read("t", 1, 3, slot="momenta"), SLOT[1:3])
        assert checkpoint.read("t", 4).shape == (0, 3)
        assert checkpoint.read("t", slot="momenta").dtype == np.float32
        out = np.zeros((2, 3), np.float16)
        checkpoint.read_into("t", 2, out)
        np.testing.assert_array_equal(out, TABLE[2:])
    assert checkpoint.closed == 1


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (-1, 2), (3, 2), (5, None)])
def test_a_range_outside_of_the_table_is_refused(start: int, stop: int | None) -> None:
    with refused(RowRangeError, match=r"table 't'"):
        Small().read("t", start, stop)


@pytest.mark.parametrize(
    "out", [np.zeros((2, 2), np.float16), np.zeros((2, 3), np.float32), np.zeros(3, np.float16), np.zeros((1, 2, 3))]
)
def test_an_array_of_another_form_is_refused(out: Array) -> None:
    with refused(ConfigError, match="table 't'"):
        Small().read_into("t", 0, out)


def test_rows_that_do_not_fit_behind_the_start_are_refused() -> None:
    with pytest.raises(RowRangeError):
        Small().read_into("t", 3, np.zeros((2, 3), np.float16))


@pytest.mark.parametrize(
    "call",
    [
        lambda checkpoint, name: checkpoint.read(name),
        lambda checkpoint, name: checkpoint.read_into(name, 0, np.zeros((1, 3), np.float16)),
        lambda checkpoint, name: checkpoint.checksum(name),
        lambda checkpoint, name: checkpoint.verify([name]),
        lambda checkpoint, name: checkpoint.read_buffer_bytes(name, 1),
        lambda checkpoint, name: checkpoint.piece_rows(name),
        lambda checkpoint, name: checkpoint.advise(name, 1),
        lambda checkpoint, name: checkpoint.summed(name),
    ],
)
def test_every_method_refuses_an_unknown_table(call: Callable[[Small, str], Any]) -> None:
    call(Small(), "t")
    with refused(UnknownTableError, match="table 'u'"):
        call(Small(), "u")
    with refused(UnknownTableError, match="table 't'"):
        Small().read("t", slot="linears")


def test_a_reader_without_extras_has_neutral_ones() -> None:
    checkpoint = Small()
    assert (checkpoint.options, checkpoint.layer_config) == ({}, None)
    assert (checkpoint.checksum("t"), checkpoint.read_buffer_bytes("t", 4)) == (None, 0)
    assert (checkpoint.piece_rows("t"), checkpoint.advise("t", 1), checkpoint.summed("t")) == (None, None, None)
    assert checkpoint.proven(["t"], {}) == {}
    assert (checkpoint.objects(["t"]), checkpoint.policies(), checkpoint.model_config()) == (None, {}, None)
    with refused(CheckpointFormatError, match="weight 'w'"):
        checkpoint.read_weight(Weight("w", "w", (), "float32"))
