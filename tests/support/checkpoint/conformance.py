"""What every checkpoint reader must do, as tests of a class whose subclasses say what is read."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.tpu_checkpoints import SLOTS, Values
from tpuembed.checkpoint import Checkpoint, open_checkpoint
from tpuembed.errors import ConfigError, RowRangeError, UnknownTableError

Array = np.ndarray[Any, Any]
ReadSums = Callable[[str, Mapping[str, Any]], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Truth:
    """A table as whoever wrote the checkpoint knew it."""

    rows: Array
    slots: Mapping[str, Array] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Case:
    """A checkpoint on disk and what it holds."""

    path: Path | str
    tables: Mapping[str, Truth]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def random_table(rows: int, dim: int, dtype: str = "float32") -> Array:
    values = np.random.default_rng(rows * 31 + dim).normal(size=(rows, dim))
    return values.astype(tf.as_dtype(dtype).as_numpy_dtype)


class CheckpointConformance:
    """Subclasses give the fixture `case`."""

    @pytest.fixture
    def checkpoint(self, case: Case) -> Iterator[Checkpoint]:
        with open_checkpoint(case.path, **case.options) as checkpoint:
            yield checkpoint

    def test_names_shapes_dtypes_and_slots(self, case: Case, checkpoint: Checkpoint) -> None:
        assert isinstance(checkpoint, Checkpoint)
        tables = checkpoint.tables()
        assert set(tables) == set(case.tables)
        for name, truth in case.tables.items():
            info = tables[name]
            assert (info.name, info.rows, info.dim) == (name, *truth.rows.shape)
            assert info.dtype == truth.rows.dtype
            assert set(info.slots) == set(truth.slots)

    def test_whole_reads(self, case: Case, checkpoint: Checkpoint) -> None:
        for name, truth in case.tables.items():
            np.testing.assert_array_equal(checkpoint.read(name), truth.rows)
            for slot, values in truth.slots.items():
                np.testing.assert_array_equal(checkpoint.read(name, slot=slot), values)

    def test_ranges(self, case: Case, checkpoint: Checkpoint) -> None:
        rng = np.random.default_rng(0)
        for name, truth in case.tables.items():
            rows = len(truth.rows)
            ranges = [(0, 0), (rows, rows), (0, 1), (rows - 1, rows), *np.sort(rng.integers(0, rows + 1, (20, 2)))]
            for start, stop in ranges:
                for slot, values in [(None, truth.rows), *truth.slots.items()]:
                    found = checkpoint.read(name, start, stop, slot)
                    assert found.dtype == values.dtype
                    np.testing.assert_array_equal(found, values[start:stop])

    def test_reads_into_a_given_array(self, case: Case, checkpoint: Checkpoint) -> None:
        for name, truth in case.tables.items():
            rows, dim = truth.rows.shape
            for slot, values in [(None, truth.rows), *truth.slots.items()]:
                whole = np.full((rows + 2, dim), 7, values.dtype)
                checkpoint.read_into(name, 1, whole[2 : rows + 1], slot)
                np.testing.assert_array_equal(whole[2 : rows + 1], values[1:])
                assert (whole[[0, 1, rows + 1]] == 7).all()
            with pytest.raises(ConfigError, match="out must be"):
                checkpoint.read_into(name, 0, np.empty((1, dim + 1), truth.rows.dtype))
            with pytest.raises(ConfigError, match="out must be"):
                checkpoint.read_into(name, 0, np.empty((1, dim), np.int8))

    def test_bad_ranges(self, case: Case, checkpoint: Checkpoint) -> None:
        for name, truth in case.tables.items():
            rows = len(truth.rows)
            for start, stop in [(-1, 0), (0, rows + 1), (rows + 1, rows + 1), (1, 0)]:
                with pytest.raises(RowRangeError) as caught:
                    checkpoint.read(name, start, stop)
                assert isinstance(caught.value, IndexError)
                assert f"table {name!r}: rows [{start}, {stop})" in str(caught.value)
                assert str(rows) in str(caught.value)
            with pytest.raises(RowRangeError):
                checkpoint.read_into(name, rows, np.empty((1, truth.rows.shape[1]), truth.rows.dtype))

    def test_unknown_names(self, case: Case, checkpoint: Checkpoint) -> None:
        name = max(case.tables)
        with pytest.raises(UnknownTableError) as caught:
            checkpoint.read(name + "x")
        assert isinstance(caught.value, KeyError)
        assert f"did you mean {name!r}?" in str(caught.value)
        with pytest.raises(UnknownTableError, match=r"has no slot 'nonsense'; known: "):
            checkpoint.read(name, slot="nonsense")

    def test_opens_again_by_its_own_path(self, case: Case, checkpoint: Checkpoint) -> None:
        assert set(checkpoint.options) == set(case.options)
        options = json.loads(json.dumps(dict(checkpoint.options)))
        with open_checkpoint(checkpoint.path, **options) as again:
            assert again.tables() == checkpoint.tables()
            assert again.fingerprint() == checkpoint.fingerprint()
            assert again.format == checkpoint.format

    def test_without_tensorflow(self, case: Case, read_sums: ReadSums) -> None:
        """In a process that never imported it: the sum of every table, read row by row."""
        sums = {name: truth.rows.astype("float64").sum() for name, truth in case.tables.items()}
        assert read_sums(str(case.path), case.options) == pytest.approx(sums)


def truths(values: Values, optimizer: str) -> dict[str, Truth]:
    return {
        name: Truth(roles["parameters"], {slot: roles[slot] for slot in SLOTS[optimizer]})
        for name, roles in values.items()
    }
