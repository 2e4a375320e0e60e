"""Descriptions and rows, against what a writer held."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoint.bundles import write
from tests.support.messages import refused
from tpuembed.checkpoint.tools import describe_checkpoint, read_rows, stream_rows
from tpuembed.errors import ConfigError, RowRangeError, UnknownTableError

GOLDEN = Path(__file__).parents[3] / "golden" / "tfrs" / "adam_lookups"


def test_streamed_pieces_are_all_rows_once(tmp_path: Path) -> None:
    """A piece of 4 MiB has four of these rows."""
    table = np.arange(11 << 18, dtype=np.float32).reshape(11, 1 << 18)
    write(tmp_path / "ckpt", {"t": table, "empty": np.ones((9, 0), np.float32)})
    for start, stop in [(0, 11), (1, 9), (3, 3), (11, 11), (7, 8)]:
        pieces = list(stream_rows(tmp_path / "ckpt", "t", start, stop))
        assert [piece.start for piece in pieces] == list(range(start, max(stop, start + 1), 4))
        np.testing.assert_array_equal(np.concatenate([piece.values for piece in pieces]), table[start:stop])
        np.testing.assert_array_equal(read_rows(tmp_path / "ckpt", "t", start, stop).values, table[start:stop])
    assert read_rows(tmp_path / "ckpt", "empty", 2, 9).values.shape == (7, 0)


def test_what_is_not_there() -> None:
    with refused(UnknownTableError, match="'table_2'"):
        read_rows(GOLDEN / "ckpt", "table_3")
    with refused(UnknownTableError, match="no slot 'accumulators'"):
        read_rows(GOLDEN / "ckpt", "table_2", slot="accumulators")
    for start, stop in [(0, 6), (6, None), (-1, 2), (3, 2)]:
        with pytest.raises(RowRangeError):
            read_rows(GOLDEN / "ckpt", "table_2", start, stop)
    with refused(ConfigError):
        read_rows(GOLDEN / "ckpt", "table_2", checkpoint_options={"nonsense": 1})


def test_descriptions(tmp_path: Path) -> None:
    write(tmp_path / "ckpt", {"b": np.ones((4, 3), np.float16), "a": np.ones((2, 5), np.float64)})
    found = describe_checkpoint(tmp_path / "ckpt")
    assert found == {
        "path": str(tmp_path / "ckpt"),
        "format": "dense",
        "tables": [
            {"name": "a", "rows": 2, "dim": 5, "dtype": "float64", "slots": (), "layout": "", "bytes": 80},
            {"name": "b", "rows": 4, "dim": 3, "dtype": "float16", "slots": (), "layout": "", "bytes": 24},
        ],
        "bytes": 104,
    }
    slots = describe_checkpoint(GOLDEN / "ckpt")["tables"][0]
    assert (slots["name"], slots["slots"], slots["bytes"]) == ("table_2", ("momenta", "velocities"), 5 * 2 * 4 * 3)
