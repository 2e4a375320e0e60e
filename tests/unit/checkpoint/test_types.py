"""What the base class of all readers checks and adds, for a reader that has only what it must have."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.messages import refused
from tpuembed.checkpoint import Checkpoint, TableInfo
from tpuembed.checkpoint.types import Array
from tpuembed.errors import UnknownTableError

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


@pytest.mark.parametrize(
    "call",
    [
        lambda checkpoint, name: checkpoint.read(name),
        lambda checkpoint, name: checkpoint.read_into(name, 0, np.zeros((1, 3), np.float16)),
        lambda checkpoint, name: checkpoint.verify([name]),
        lambda checkpoint, name: checkpoint.read_buffer_bytes(name, 1),
        lambda checkpoint, name: checkpoint.vocabulary(name),
    ],
)
def test_every_method_refuses_an_unknown_table(call: Callable[[Small, str], Any]) -> None:
    call(Small(), "t")
    with refused(UnknownTableError, match="table 'u'"):
        call(Small(), "u")
    with refused(UnknownTableError, match="table 't'"):
        Small().read("t", slot="linears")
