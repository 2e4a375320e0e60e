"""Searches the index of a retrieval export by `native/src/search.c`, without TensorFlow.

TensorFlow writes all scores into memory and then looks for the best. The C library keeps the best while it computes the scores.
The results are those of the export's graph, up to the rounding of sums. Equal scores have the lower place first.
"""

import ctypes
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError
from tpuembed.manifest import STORAGE_TYPES, Manifest
from tpuembed.native.lookup import VARIANTS, fields, load_library, mapped_array, variant

__all__ = ["EXCLUDE", "REQUIRE", "NativeSearch", "SearchIndex", "search_ranges", "search_refusal"]

Array = npt.NDArray[Any]

EXCLUDE: Final = "exclude"
REQUIRE: Final = "require_tags"
"""Inputs of the signature `filtered`, beside those of the query's model."""
_ROWS: Final = 256
"""ROWS of search.c."""


class SearchIndex(ctypes.Structure):
    """`struct index` of search.c."""

    _fields_ = fields("rows ids tags", "storage dim row_bytes")


def search_ranges(
    index: SearchIndex, queries: Array, wanted: Array | None, ranges: Array, scores: Array, places: Array
) -> None:
    """Write the best of some rows of the index: scores, float32 [batch, k], and places, int64 [batch, k].

    Args:
        index: whose arrays are alive.
        queries: float32 [batch, dim], contiguous.
        wanted: uint64 [batch], or None.
        ranges: int64 [n, 2], first rows and ends.
        scores, places: contiguous.
    """
    library = load_library()
    assert not isinstance(library, str), library
    some = None if wanted is None else np.ascontiguousarray(wanted, np.uint64)
    ranges, sizes = np.ascontiguousarray(ranges, np.int64), np.zeros(len(queries), np.int64)
    decoded = np.empty(_ROWS * index.dim, np.float32)
    library.tpuembed_search(
        VARIANTS.index(variant()),
        ctypes.addressof(index),
        queries.ctypes.data,
        None if some is None else some.ctypes.data,
        len(queries),
        ranges.ctypes.data,
        len(ranges),
        decoded.ctypes.data,
        scores.ctypes.data,
        places.ctypes.data,
        sizes.ctypes.data,
        scores.shape[1],
    )


def search_refusal(manifest: Manifest) -> str:
    """Return "" if the C library can search the export, else the reason why not."""
    if manifest.layout != "mmap":
        return f"its layout is {manifest.layout}, and native searches map the index: export with layout mmap"
    return ""


class NativeSearch:
    """The index of an export, mapped. Any thread may call its methods, which raise ConfigError for another shape or dtype."""

    def __init__(self, manifest: Manifest, version_dir: Path) -> None:
        """Map the index of the export at `version_dir`, whose `search_refusal` is empty. Raises ConfigError if it cannot."""
        assert manifest.retrieval is not None
        self.entry = entry = manifest.retrieval
        (stack,) = [
            one
            for one in manifest.stacks
            if one.name == next(table.stack for table in manifest.tables if table.name == entry.table)
        ]
        self.dim = stack.dim
        types = {"names": np.uint8, "centroids": np.float32}
        arrays = {name: mapped_array(version_dir, array) for name, array in entry.arrays.items()}
        self._arrays: dict[str, Array] = {
            name: np.asarray(array.view(types.get(name, np.int64))) for name, array in arrays.items()
        }
        whole = next(array for array in manifest.arrays if array.file == stack.file)
        self._rows, self._count = mapped_array(version_dir, whole), stack.rows
        self._index = SearchIndex(
            self._rows.ctypes.data,
            self._arrays["ids"].ctypes.data,
            self._arrays["tags"].ctypes.data if entry.has_tags else None,
            STORAGE_TYPES.index(stack.storage),
            stack.dim,
            stack.row_bytes,
        )
        if entry.index == "ivf":
            self._centroids = np.array(self._arrays["centroids"].reshape(entry.partitions, self.dim))
            first_rows = self._arrays["first_blocks"] * entry.block_rows
            self._ranges = np.stack([first_rows[:-1], first_rows[1:]], 1)

    def search(self, queries: Array, k: int, wanted: Array | None = None) -> tuple[Array, Array]:
        """Return scores, float32 [batch, k], and places, int64 [batch, k], of the best candidates; -infinity and -1 for none.

        A query whose partitions have fewer than `k` candidates that pass is compared with all.

        Args:
            queries: float32 [batch, dim], finite: the vectors that the signature `query` returns.
            k: how many.
            wanted: uint64 [batch], the tags that a candidate needs; None if no query needs one.
        """
        queries = np.ascontiguousarray(queries, np.float32)
        if queries.ndim != 2 or queries.shape[1] != self.dim:
            raise ConfigError(f"queries have the shape {list(queries.shape)}. The index takes [batch, {self.dim}].")
        batch = len(queries)
        scores, places = np.empty((batch, k), np.float32), np.empty((batch, k), np.int64)
        everything = np.array([[0, self._count]])
        if self.entry.index == "exact":
            search_ranges(self._index, queries, wanted, everything, scores, places)
        else:
            order = np.argpartition(-(queries @ self._centroids.T), self.entry.nprobe - 1, 1)[:, : self.entry.nprobe]
            ranges = self._ranges[order]
            for number in range(batch):
                one = slice(number, number + 1)
                some = None if wanted is None else wanted[one]
                search_ranges(self._index, queries[one], some, ranges[number], scores[one], places[one])
                if places[number, -1] < 0 and self.entry.nprobe < self.entry.partitions:
                    search_ranges(self._index, queries[one], some, everything, scores[one], places[one])
        return scores, places

    def ids(self, places: Array) -> Array:
        """Return the ids of candidates, int64, or bytes in an array of dtype object; -1 or b"" for the place -1."""
        numbers = np.where(places < 0, -1, self._arrays["ids"][np.maximum(places, 0)])
        if self.entry.ids == "int64":
            return numbers
        names, offsets = self._arrays["names"], self._arrays["offsets"]
        found = np.empty(numbers.shape, object)
        found.ravel()[:] = [
            b"" if number < 0 else names[offsets[number] : offsets[number + 1]].tobytes() for number in numbers.ravel()
        ]
        return found

    def filtered(self, queries: Array, exclude: Array, wanted: Array) -> tuple[Array, Array]:
        """Return ids and scores as the signature `filtered` does.

        Args:
            queries: as for `search`.
            exclude: ids [batch, n] that are no answer, int64 or objects.
            wanted: uint64 [batch], see `search`.
        """
        k, dtype = self.entry.k, np.dtype(np.int64 if self.entry.ids == "int64" else object)
        if exclude.ndim != 2 or not exclude.shape[:1] == wanted.shape == queries.shape[:1]:
            shapes = ", ".join(str(list(array.shape)) for array in (queries, exclude, wanted))
            raise ConfigError(f"queries, exclude and require_tags have the shapes {shapes}. Send as many rows of each.")
        if exclude.dtype != dtype or wanted.dtype != np.uint64:
            raise ConfigError(
                f"exclude is {exclude.dtype} and require_tags {wanted.dtype}. The index takes {dtype} and uint64."
            )
        scores, places = self.search(queries, k + exclude.shape[1], wanted if wanted.any() else None)
        ids = self.ids(places)
        for number in range(len(ids)):
            out = set(exclude[number].tolist())
            scores[number][[one in out for one in ids[number].tolist()]] = -np.inf
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        scores, ids = np.take_along_axis(scores, best, 1), np.take_along_axis(ids, best, 1)
        ids[np.isneginf(scores)] = -1 if self.entry.ids == "int64" else b""
        return ids, scores
