"""Reads the ids of a sample of training examples from a file."""

import dataclasses
import zipfile
import zlib
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


def read_sample(path: str | Path) -> dict[str, FeatureIds]:
    """Return {feature: its ids} of a `.npz` file: an integer array [examples] or [examples, ids] per feature, padded with -1.

    Raises:
        ConfigError: the file cannot be read, or has no example.
    """
    path = Path(path)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: _checked(path, name, arrays[name]) for name in arrays.files}
    except OSError as error:
        raise ConfigError(f"sample {path}: cannot be read: {reason(error)}") from None
    except ConfigError:
        raise
    except (ValueError, TypeError, zipfile.BadZipFile, zlib.error, EOFError):
        raise ConfigError(f"sample {path}: is not an .npz of plain arrays. Write it with numpy.savez.") from None
    if not found or not next(iter(found.values())).count:
        raise ConfigError(f"sample {path}: has no examples.")
    return found


def _checked(path: Path, name: str, array: Any) -> FeatureIds:
    if not np.issubdtype(array.dtype, np.integer) or array.ndim not in (1, 2):
        raise ConfigError(
            f"sample {path}: {name!r} must be integers [examples] or [examples, ids], got {array.dtype} {list(array.shape)}"
        )
    if array.size and int(array.max()) > _MAX_ID:
        raise ConfigError(f"sample {path}: {name!r} has id {array.max()}. The largest valid id is {_MAX_ID}.")
    return FeatureIds.of_array(array)
