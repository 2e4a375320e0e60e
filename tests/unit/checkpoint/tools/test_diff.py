"""Differences, counted by hand or by numpy."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.checkpoint.bundles import write
from tpuembed.checkpoint.tools import LargestChange, TableDiff, diff_checkpoints

Array = np.ndarray[Any, Any]
NAN, INF = float("nan"), float("inf")


def diff(folder: Path, a: Mapping[str, Array], b: Mapping[str, Array]) -> dict[str, TableDiff]:
    write(folder / "a", a)
    write(folder / "b", b)
    return {table.name: table for table in diff_checkpoints(folder / "a", folder / "b").tables}


def one(folder: Path, a: Any, b: Any, dtype: Any = "float32") -> TableDiff:
    return diff(folder, {"t": np.array(a, dtype)}, {"t": np.array(b, dtype)})["t"]


def near(row: int, by: float) -> Any:
    return LargestChange(row, pytest.approx(by, rel=1e-12))  # type: ignore[arg-type]


def test_equal_values_do_not_differ(tmp_path: Path) -> None:
    """By value: NaN is NaN, whatever its bits, and -0 is 0."""
    write(tmp_path / "a", {"t": np.array([[0.0, NAN], [INF, -INF]], np.float32)})
    write(tmp_path / "b", {"t": np.array([[-0.0, -NAN], [INF, -INF]], np.float32)})
    found = diff_checkpoints(tmp_path / "a", tmp_path / "b")
    assert not found.differs
    [table] = found.tables
    assert (table.rows_compared, table.rows_changed, table.largest_l2, table.largest_abs) == (2, 0, None, None)


def test_rows_changed_and_the_largest(tmp_path: Path) -> None:
    """The row of the largest norm is not that of the largest element."""
    a = [[0, 0, 0], [1, 1, 1], [2, 2, 2], [3, 3, 3]]
    b = [[0, 0, 0], [1, 1, 6], [-2, -2, 2], [3, 3, 3.5]]
    found = one(tmp_path, a, b)
    assert (found.rows_compared, found.rows_changed, found.rows_nan) == (4, 3, 0)
    assert found.largest_abs == LargestChange(1, 5.0)
    assert found.largest_l2 is not None
    assert found.largest_l2.row == 2
    assert found.largest_l2.by == pytest.approx(32**0.5, rel=1e-15)


def test_nan_on_one_side_has_no_size(tmp_path: Path) -> None:
    found = one(tmp_path, [[NAN, 1], [0, 0], [NAN, NAN]], [[0, 9], [0, 2], [NAN, 5]])
    assert (found.rows_changed, found.rows_nan) == (3, 2)
    assert found.largest_l2 == found.largest_abs == LargestChange(1, 2.0)
    found = one(tmp_path, [[NAN, 1], [NAN, NAN]], [[NAN, 4], [NAN, NAN]])
    assert (found.rows_changed, found.rows_nan, found.largest_abs) == (1, 0, LargestChange(0, 3.0))


def test_infinities_are_compared_by_sign(tmp_path: Path) -> None:
    found = one(tmp_path, [[0, INF], [INF, INF], [1, 2]], [[0, INF], [-INF, INF], [1, 4]])
    assert found.rows_changed == 2
    assert found.largest_l2 == found.largest_abs == LargestChange(1, INF)
    assert found.rows_nan == 0


def test_changes_too_large_or_small_to_square(tmp_path: Path) -> None:
    found = one(tmp_path, [[0.0, 0.0]], [[3e200, 4e200]], "float64")
    assert found.largest_l2 == near(0, 5e200)
    found = one(tmp_path, [[0.0, 0.0]], [[3e-200, 4e-200]], "float64")
    assert found.largest_l2 == near(0, 5e-200)


def test_shapes_and_dtypes(tmp_path: Path) -> None:
    """More rows: those that both have are compared. Another width: none are."""
    a = np.arange(12).reshape(6, 2)
    tables = diff(
        tmp_path,
        {"rows": a.astype("f4"), "dim": a.astype("f4"), "dtype": a.astype("f4")},
        {"rows": a[:4].astype("f4"), "dim": a.reshape(4, 3).astype("f4"), "dtype": a.astype(ml_dtypes.bfloat16)},
    )
    assert all(table.differs and not table.rows_changed for table in tables.values())
    assert tables["rows"].shapes == ((6, 2), (4, 2))
    assert tables["rows"].rows_compared == 4
    assert (tables["dim"].shapes, tables["dim"].rows_compared) == (((6, 2), (4, 3)), 0)
    assert (tables["dtype"].dtypes, tables["dtype"].rows_compared) == (("float32", "bfloat16"), 6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_over_many_pieces(tmp_path: Path, dtype: str) -> None:
    """Against numpy, over everything at once: ten pieces of 4 MiB as float64."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=(1000, 5243)).astype(getattr(ml_dtypes, dtype, dtype))
    b = a.copy()
    changed = rng.choice(1000, 37, replace=False)
    b[changed] += rng.normal(size=(37, 5243)).astype(a.dtype)
    found = one(tmp_path, a, b, a.dtype)
    change = np.abs(b.astype(np.float64) - a.astype(np.float64))
    norms = np.sqrt((change**2).sum(axis=1))
    assert found.rows_changed == 37
    assert found.largest_abs == LargestChange(int(change.max(axis=1).argmax()), change.max())
    assert found.largest_l2 == near(int(norms.argmax()), norms.max())


def test_slots_of_one_side_are_listed(tmp_path: Path) -> None:
    """Goldens: Adam's slots of one, none of the other."""
    goldens = Path(__file__).parents[3] / "golden" / "tfrs"
    adam, none = goldens / "keras_adam" / "ckpt", goldens / "no_optimizer" / "ckpt"
    found = diff_checkpoints(adam, none)
    assert found.slots_removed == tuple(
        f"{table}/{slot}" for table in ("table_2", "user", "video/table.v1") for slot in ("momenta", "velocities")
    )
    assert found.slots_added == ()
    assert diff_checkpoints(none, adam).slots_added == found.slots_removed
    with_slots = diff_checkpoints(adam, adam, slots=True)
    assert [(table.name, table.slot) for table in with_slots.tables[:3]] == [
        ("table_2", None),
        ("table_2", "momenta"),
        ("table_2", "velocities"),
    ]
    assert not with_slots.differs


def test_rows_of_one_slot_alone_changed(tmp_path: Path) -> None:
    """A golden, in which one number of one slot is another: its table and its other slot are as they were."""
    golden = Path(__file__).parents[3] / "golden" / "tfrs" / "keras_adam"
    shutil.copytree(golden, tmp_path / "copy")
    rows = np.load(golden / "table2-velocities.npy")
    data = tmp_path / "copy" / "ckpt.data-00000-of-00001"
    at = data.read_bytes().index(rows.tobytes()) + rows[:3].nbytes
    changed = bytearray(data.read_bytes())
    changed[at : at + 4] = (rows[3, 0] + np.float32(8)).tobytes()
    data.write_bytes(changed)
    found = diff_checkpoints(golden / "ckpt", tmp_path / "copy" / "ckpt", slots=True)
    [differs] = [table for table in found.tables if table.differs]
    assert (differs.name, differs.slot, differs.rows_changed) == ("table_2", "velocities", 1)
    assert differs.largest_abs is not None
    assert differs.largest_abs.row == 3
    assert differs.largest_abs.by == pytest.approx(8, rel=1e-6)
    assert not diff_checkpoints(golden / "ckpt", tmp_path / "copy" / "ckpt").differs
