"""The difference between looked up values and float32, measured while rows are stored, and summed over shards and
tables.

The largest error covers every value. RMS and cosine cover rows sampled at even distances, and all rows of a small
table. More rows would not make these two figures better.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

__all__ = ["SAMPLE_VALUE_BYTES", "ErrorSums", "TableError", "sample_step", "sampled_rows"]

_SAMPLED_ROWS = 1 << 10
_SAMPLED_VALUES = 1 << 14
SAMPLE_VALUE_BYTES = 24
"""Bytes that a sampled value takes while it is compared: as read, as decoded, and in between."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorSums:
    """Sums over some rows, of finite values. Every field is a JSON number.

    Attributes:
        max_abs: largest |looked up - float32| of every value.
        values, squares: number of values in sampled rows, and the sum of their squared errors.
        rows, cosines, min_cosine: number of sampled rows that are not zero, and the cosines of looked up and float32
        rows.
    """

    max_abs: float = 0.0
    values: int = 0
    squares: float = 0.0
    rows: int = 0
    cosines: float = 0.0
    min_cosine: float = 1.0

    @classmethod
    def of(cls, max_abs: float, rows: npt.NDArray[np.float32], looked_up: npt.NDArray[np.float32]) -> "ErrorSums":
        """Return the sums of sampled `rows` [n, dim] and their looked up values. `max_abs` covers all rows."""
        sound = np.isfinite(rows).all(1)
        true, stored = rows[sound], looked_up[sound]
        difference = stored - true
        lengths = np.sqrt(_dot(true, true) * _dot(stored, stored))
        cosines = np.minimum(_dot(true, stored)[lengths > 0] / lengths[lengths > 0], 1.0)
        return cls(
            max_abs=max_abs,
            values=difference.size,
            squares=float(_dot(difference, difference).sum()),
            rows=len(cosines),
            cosines=float(cosines.sum()),
            min_cosine=float(cosines.min(initial=1.0)),
        )

    def __add__(self, other: "ErrorSums") -> "ErrorSums":
        """Return the sums of the rows of both."""
        return ErrorSums(
            max_abs=max(self.max_abs, other.max_abs),
            values=self.values + other.values,
            squares=self.squares + other.squares,
            rows=self.rows + other.rows,
            cosines=self.cosines + other.cosines,
            min_cosine=min(self.min_cosine, other.min_cosine),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableError:
    """The effect of storing a table as `storage` on its lookups, compared with float32.

    Attributes:
        storage: key of STORAGES.
        max_abs: largest absolute difference of a value.
        rms: root of the mean squared difference, of sampled rows.
        cosine, min_cosine: mean and smallest cosine of sampled rows; None if all of them are zero.
        sampled_rows: number of rows with a cosine; 0 if the storage is exact, which needs no sample.
    """

    storage: str
    max_abs: float = 0.0
    rms: float = 0.0
    cosine: float | None = 1.0
    min_cosine: float | None = 1.0
    sampled_rows: int = 0

    def __str__(self) -> str:
        """Return the error as one line."""
        if self.sampled_rows == 0:
            return f"{self.storage}, largest error {self.max_abs:.3g}"
        return (
            f"{self.storage}, largest error {self.max_abs:.3g}, RMS {self.rms:.3g}, "
            f"cosine {self.cosine:.6f} (smallest {self.min_cosine:.6f}) of {self.sampled_rows:,} rows"
        )

    def merged(self, other: "TableError") -> "TableError":
        """Return the error of the rows of both, which are stored alike."""
        rows, others = self.sampled_rows, other.sampled_rows
        cosines = [(each.cosine, each.sampled_rows) for each in (self, other) if each.cosine is not None]
        smallest = [each.min_cosine for each in (self, other) if each.min_cosine is not None]
        total = sum(count for _, count in cosines)
        return TableError(
            storage=self.storage,
            max_abs=max(self.max_abs, other.max_abs),
            rms=float(np.sqrt((self.rms**2 * rows + other.rms**2 * others) / max(1, rows + others))),
            cosine=sum(cosine * count for cosine, count in cosines) / total if total else self.cosine,
            min_cosine=min(smallest, default=None),
            sampled_rows=rows + others,
        )

    @classmethod
    def of(cls, storage: str, sums: ErrorSums) -> "TableError":
        """Return the error of a table that is not stored exactly."""
        return cls(
            storage=storage,
            max_abs=sums.max_abs,
            rms=float(np.sqrt(sums.squares / max(1, sums.values))),
            cosine=sums.cosines / sums.rows if sums.rows else None,
            min_cosine=sums.min_cosine if sums.rows else None,
            sampled_rows=sums.rows,
        )


def sample_step(rows: int, dim: int) -> int:
    """Return the distance between sampled rows of a chunk."""
    return -(-rows // sampled_rows(rows, dim))


def sampled_rows(rows: int, dim: int) -> int:
    """Return the most rows of a chunk that are sampled."""
    return max(1, min(rows, _SAMPLED_ROWS, _SAMPLED_VALUES // dim))


def _dot(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return the dot products [n] of rows, summed in float64 without a float64 copy."""
    product: npt.NDArray[np.float64] = np.einsum("ij,ij->i", a, b, dtype=np.float64)
    return product
