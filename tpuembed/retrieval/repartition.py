"""Divides the candidates of an overlay into new partitions, for a full version in the same graph.

The graph has a place for each row and the number of partitions, so both stay: the rows are put in another order.
"""

import dataclasses
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from tpuembed.errors import CheckpointCorruptError, ExportError
from tpuembed.export.publish.layouts import BUNDLE
from tpuembed.manifest import ArrayEntry, RetrievalEntry
from tpuembed.retrieval.opened import OpenedRetrieval, open_retrieval
from tpuembed.retrieval.partitions import BLOCK_ROWS, CENTROID_ROWS, Floats, assign, centroids_of, in_order
from tpuembed.retrieval.recall import QUERIES, measured, sample_vectors, with_probes
from tpuembed.saved_model import GRAPH_FILE, file_crc32c
from tpuembed.tensor_bundle import Bundle, index_path, read_index, shard_path, write_index

__all__ = ["Repartition", "fit", "repartition"]

Integers = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Repartition:
    """New places of candidates.

    Attributes:
        table: of their vectors.
        places: int64 [rows], the new place of the vector at each place of the overlay; -1 for one that is no candidate's.
        entry: the retrieval of the full version, with the arrays of the overlay.
        arrays: the values that change, by name; see RetrievalEntry.
    """

    table: str
    places: Integers
    entry: RetrievalEntry
    arrays: dict[str, npt.NDArray[Any]]

    def write(self, version: Path) -> RetrievalEntry:
        """Write the arrays, and the number of partitions to search, into the files of a full version. Return its retrieval.

        Of layout mmap it has `fresh` too, which is not the full version's.
        """
        graph = version / GRAPH_FILE
        graph.write_bytes(with_probes(graph.read_bytes(), self.entry.nprobe, graph))
        found: dict[str, ArrayEntry] = {}
        for name, array in self.entry.arrays.items():
            if name in self.arrays:
                data = np.ascontiguousarray(self.arrays[name])
                (version / array.file).write_bytes(data.data)
                array = dataclasses.replace(array, crc32c=google_crc32c.value(data))
            found[name] = array
        if not found:
            self._write_variables(version)
        return dataclasses.replace(self.entry, arrays=found)

    def _write_variables(self, version: Path) -> None:
        prefix = version / BUNDLE
        index = read_index(index_path(prefix))
        entries = dict(index.entries)
        for key, entry in index.entries.items():
            name = key.split("/")[1] if key.startswith("index/") else ""
            if name in self.arrays:
                data = np.ascontiguousarray(self.arrays[name]).tobytes()
                assert len(data) == entry.size, "the graph has the shapes of the overlay"
                with shard_path(prefix, entry.shard, index.num_shards).open("r+b") as file:
                    file.seek(entry.offset)
                    file.write(data)
                entries[key] = dataclasses.replace(entry, crc32c=google_crc32c.value(data))
        write_index(index_path(prefix), entries, index.num_shards)


def repartition(version: Path) -> Repartition:
    """Return new partitions of the candidates of the overlay `version`, and the recall of a search of them.

    The recall is measured on candidates, and the number of partitions to search chosen for the overlay's `min_recall`.

    Raises:
        ExportError: an array of the index is damaged. Rows are not checked.
    """
    with open_retrieval(version) as opened:
        entry, count = opened.entry, opened.entry.partitions
        _check(version, entry)
        centroids = centroids_of(sample_vectors(opened, CENTROID_ROWS * count), count)
        partitions = np.empty(entry.candidates, np.int32)
        for first, vectors in opened.batches():
            partitions[first : first + len(vectors)] = assign(vectors, centroids)
        fit(partitions, centroids, opened)
        order = np.full(opened.rows, -1, np.int64)
        first_blocks = in_order(partitions, count, lambda size: order[:size])
        is_there, old = order >= 0, opened.places[np.maximum(order, 0)]
        places = np.full(opened.rows, -1, np.int64)
        places[old[is_there]] = np.flatnonzero(is_there)
        arrays: dict[str, npt.NDArray[Any]] = {
            "centroids": centroids,
            "first_blocks": first_blocks,
            "ids": np.where(is_there, opened.arrays["ids"][old], -1),
        }
        if "tags" in opened.arrays:
            arrays["tags"] = np.where(is_there, opened.arrays["tags"][old], 0)
        new = measured(
            entry,
            sample_vectors(opened, QUERIES),
            opened.batches(),
            centroids,
            partitions,
            "candidates",
            entry.min_recall,
        )
    return Repartition(entry.table, places, new, arrays)


def _check(version: Path, entry: RetrievalEntry) -> None:
    damaged = [array.file for array in entry.arrays.values() if file_crc32c(version / array.file) != array.crc32c]
    if not entry.arrays:
        with Bundle.open(version / BUNDLE) as bundle:
            for key in (key for key in bundle.entries if key.startswith("index/")):
                try:
                    bundle.verify(key)
                except CheckpointCorruptError:
                    damaged.append(key)
    if damaged:
        raise ExportError(
            f"version {version}: {damaged[0]} of its index has another checksum than it was written with. Restore it from a copy, "
            "or export the retrieval again."
        )


def fit(partitions: npt.NDArray[np.int32], centroids: Floats, opened: OpenedRetrieval) -> None:
    """Change partitions so that their blocks are not more than there are rows for.

    Candidates beyond the last whole block of some partitions, those with the fewest, go to the nearest one with room.
    """
    sizes = np.bincount(partitions, minlength=len(centroids))
    beyond = sizes % BLOCK_ROWS
    surplus = int((-(-sizes // BLOCK_ROWS)).sum()) - opened.rows // BLOCK_ROWS
    if surplus <= 0:
        return
    order = np.argsort(np.where(beyond == 0, BLOCK_ROWS, beyond), kind="stable")
    shrunk = np.zeros(len(centroids), bool)
    shrunk[order[:surplus]] = True
    room = np.where(shrunk | (beyond == 0), 0, BLOCK_ROWS - beyond)
    left = np.where(shrunk, beyond, 0)
    for first, vectors in opened.batches():
        own = partitions[first : first + len(vectors)]
        for number in np.flatnonzero(left[own] > 0).tolist():
            if left[own[number]]:
                left[own[number]] -= 1
                scores = np.where(room > 0, centroids @ vectors[number], -np.inf)
                own[number] = scores.argmax()
                room[own[number]] -= 1
