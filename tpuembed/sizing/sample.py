"""Reads the ids of a sample of training examples from a file."""

import csv
import dataclasses
import json
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tpuembed.errors import ConfigError, reason

__all__ = ["FeatureIds", "read_sample"]

Ids = np.ndarray[Any, np.dtype[np.int64]]
_MAX_ID = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class FeatureIds:
    """The ids of one feature in a sample.

    Attributes:
        ids: int64 [n], not negative.
        examples: int64 [n], the example of each id.
        count: the number of examples, including those without ids.
    """

    ids: Ids
    examples: Ids
    count: int

    @classmethod
    def of_array(cls, array: Any) -> "FeatureIds":
        """Return the ids of integers [examples] or [examples, ids], padded with negative ones."""
        rows = np.asarray(array)
        rows = rows[:, None] if rows.ndim == 1 else rows
        examples, places = np.nonzero(rows >= 0)
        return cls(rows[examples, places].astype(np.int64), examples.astype(np.int64), len(rows))

    @classmethod
    def of_lists(cls, lists: Iterable[Iterable[int]]) -> "FeatureIds":
        """Return the ids of a list of ids per example."""
        rows = [list(row) for row in lists]
        ids = np.array([i for row in rows for i in row], np.int64)
        examples = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        return cls(ids[ids >= 0], examples[ids >= 0], len(rows))


def read_sample(path: str | Path) -> dict[str, FeatureIds]:
    """Return {feature: its ids} of a file.

    Args:
        path: `.npz` (an integer array [examples] or [examples, ids] per feature, padded with -1), `.csv` (a column per
            feature, a row per example, ids in a cell separated by spaces) or `.jsonl` (an object per example: feature
            -> an id or a list of them).

    Raises:
        ConfigError: the file cannot be read in the format of its suffix, or has no example.
    """
    path = Path(path)
    if path.suffix not in _READERS:
        raise ConfigError(f"sample {path}: its name must end in {', '.join(_READERS)}.")
    try:
        found = _READERS[path.suffix](path)
    except OSError as error:
        raise ConfigError(f"sample {path}: cannot be read: {reason(error)}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"sample {path}: is not a {path.suffix} file: {error}") from None
    if not found or not next(iter(found.values())).count:
        raise ConfigError(f"sample {path}: has no examples.")
    return found


def _read_npz(path: Path) -> dict[str, FeatureIds]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: _checked_array(path, name, arrays[name]) for name in arrays.files}
    except ConfigError:
        raise
    except (ValueError, TypeError, zipfile.BadZipFile, zlib.error, EOFError):
        raise ConfigError(f"sample {path}: is not an .npz of plain arrays. Write it with numpy.savez.") from None


def _checked_array(path: Path, name: str, array: Any) -> FeatureIds:
    if not np.issubdtype(array.dtype, np.integer) or array.ndim not in (1, 2):
        raise ConfigError(
            f"sample {path}: {name!r} must be integers [examples] or [examples, ids], got {array.dtype} {list(array.shape)}"
        )
    if array.size and int(array.max()) > _MAX_ID:
        raise ConfigError(f"sample {path}: {name!r} has id {array.max()}. The largest valid id is {_MAX_ID}.")
    return FeatureIds.of_array(array)


def _read_csv(path: Path) -> dict[str, FeatureIds]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        names = next(rows, [])
        if len(set(names)) != len(names):
            raise ConfigError(
                f"sample {path}: its first line names a feature twice: {names}. Give each feature one column."
            )
        lines = [_cells(path, number, names, row) for number, row in enumerate(rows, 2) if row]
    return {name: FeatureIds.of_lists(line[column] for line in lines) for column, name in enumerate(names)}


def _cells(path: Path, number: int, names: list[str], row: list[str]) -> list[list[int]]:
    if len(row) != len(names):
        raise ConfigError(
            f"sample {path}: line {number} has {len(row)} cells. The first line names {len(names)} features. Make them equal."
        )
    return [_integers(path, number, name, cell.split()) for name, cell in zip(names, row, strict=True)]


def _read_jsonl(path: Path) -> dict[str, FeatureIds]:
    lines = [
        _example(path, number, line)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.strip()
    ]
    names = sorted({name for line in lines for name in line})
    return {name: FeatureIds.of_lists(line.get(name, []) for line in lines) for name in names}


def _example(path: Path, number: int, line: str) -> dict[str, list[int]]:
    try:
        example = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"sample {path}: line {number} is not JSON: {error}") from None
    if not isinstance(example, Mapping):
        raise ConfigError(f"sample {path}: line {number}: expected an object, feature -> ids, got {example!r}")
    lists = {name: value if isinstance(value, list) else [value] for name, value in example.items()}
    return {name: _integers(path, number, name, value) for name, value in lists.items()}


def _integers(path: Path, number: int, name: str, values: list[Any]) -> list[int]:
    try:
        ids = [int(value) for value in values]
        if any(isinstance(value, bool | float) for value in values) or max(map(abs, ids), default=0) > _MAX_ID:
            raise ValueError
        return ids
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(f"sample {path}: line {number}: {name!r} must be integers, got {values!r}") from None


_READERS: Mapping[str, Callable[[Path], dict[str, FeatureIds]]] = {
    ".npz": _read_npz,
    ".csv": _read_csv,
    ".jsonl": _read_jsonl,
}
