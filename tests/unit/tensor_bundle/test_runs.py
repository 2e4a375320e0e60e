"""Runs of rows out of tensors in one piece, in slices of rows over several files, and in slices of columns."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoint.bundles import save
from tests.support.messages import refused
from tpuembed.errors import CheckpointError, CheckpointFormatError, RowRangeError, UnknownTableError
from tpuembed.protobuf import Message, bytes_field, varint, varint_field
from tpuembed.tensor_bundle import Bundle

Array = np.ndarray[Any, Any]
TABLE = np.arange(40, dtype=np.float32).reshape(10, 4)
CUTS = {
    "whole": ["-:-"],
    "rows": ["0,3:-", "3,3:-", "6,4:-"],
    "rows and columns": ["0,3:-", "3,7:0,1", "3,7:1,3"],
}


@pytest.fixture(params=CUTS)
def bundle(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """TensorFlow writes every slice into a file of its own."""
    parts = []
    for number, spec in enumerate(CUTS[request.param]):
        rows, columns = (
            slice(None) if part == "-" else slice(int(part.split(",")[0]), sum(map(int, part.split(","))))
            for part in spec.split(":")
        )
        parts.append(save(tmp_path / f"part{number}", {"t": TABLE[rows, columns]}, {"t": f"10 4 {spec}"}))
    other = {"empty": np.zeros((0, 4), np.float32), "text": np.array([b"a"]), "scalar": np.float32(1)}
    parts.append(save(tmp_path / "other", other))
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=str(tmp_path / "ckpt"))
    with Bundle.open(tmp_path / "ckpt") as bundle:
        yield bundle


def read(bundle: Bundle, key: str, runs: Sequence[tuple[int, int]]) -> list[Array]:
    outs = [np.full((count, 4), np.nan, np.float32) for _, count in runs]
    views = [out.reshape(-1).view(np.uint8).data for out in outs]
    bundle.read_runs(key, np.array([row for row, _ in runs], np.int64), views)
    return outs


def test_every_run_has_its_rows(bundle: Bundle) -> None:
    runs = [(row, count) for row in range(10) for count in range(1, 11 - row)]
    for (row, count), found in zip(runs, read(bundle, "t", runs), strict=True):
        np.testing.assert_array_equal(found, TABLE[row : row + count])
        np.testing.assert_array_equal(read(bundle, "t", [(row, count)])[0], found)


def test_no_runs_are_no_rows(bundle: Bundle) -> None:
    assert read(bundle, "t", []) == []
    assert read(bundle, "t", [(3, 0), (10, 0)])[0].shape == (0, 4)
    assert read(bundle, "empty", [(0, 0)])[0].shape == (0, 4)


@pytest.mark.parametrize("run", [(-1, 1), (9, 2), (10, 1), (0, 11), (2**62, 1)])
def test_runs_that_are_not_inside(bundle: Bundle, run: tuple[int, int]) -> None:
    with refused(RowRangeError, match="tensor 't'"):
        read(bundle, "t", [(0, 1), run])
    with refused(RowRangeError, match="tensor 'empty'"):
        read(bundle, "empty", [(0, 1)])


def test_what_has_no_rows(bundle: Bundle) -> None:
    with refused(UnknownTableError, match="'tt'"):
        read(bundle, "tt", [(0, 1)])
    with refused(CheckpointFormatError):
        read(bundle, "text", [(0, 1)])
    with refused(RowRangeError, match="tensor 'scalar'"):
        read(bundle, "scalar", [(0, 1)])


def test_a_closed_bundle(bundle: Bundle) -> None:
    bundle.close()
    with refused(CheckpointError):
        read(bundle, "t", [(0, 1)])


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_repeated_integers_packed_and_not(packed: list[int], loose: list[int]) -> None:
    """Source: "Packed Repeated Fields" of protobuf's encoding guide: parsers must accept both, even mixed."""
    tag = varint(6 << 3)
    data = bytes_field(6, b"".join(map(varint, packed))) + b"".join(tag + varint(value) for value in loose)
    message = Message(varint_field(5, 7) + data)
    assert message.signed_integers(6) == packed + loose
    assert message.signed_integers(5) == [7]
    assert message.signed_integers(4) == []
