"""Measures the recall of an index, and chooses how many partitions a search reads."""

import dataclasses
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpuembed.config.checks import check_number
from tpuembed.errors import ConfigError, reason
from tpuembed.manifest import RetrievalEntry
from tpuembed.retrieval.partitions import Floats, ranks, true_neighbours

__all__ = ["QUERIES", "check_recall", "check_width", "inputs_of", "measured"]

QUERIES: Final = 1000
"""How many queries the recall is measured with where none are given."""


def check_recall(min_recall: float | None) -> None:
    """Raise ConfigError unless `min_recall` is None, or above 0 and at most 1."""
    if min_recall is not None:
        check_number("min_recall", min_recall, 0, above=True)
        if min_recall > 1:
            raise ConfigError(f"min_recall must be at most 1, got {min_recall!r}.")


def check_width(queries: int, candidates: int) -> None:
    """Raise ConfigError unless the vectors of queries and candidates have the same width."""
    if queries != candidates:
        raise ConfigError(
            f"query: its vectors have the width {queries}, and the candidates {candidates}. Give the towers of one model."
        )


def measured(
    entry: RetrievalEntry,
    queries: Floats,
    batches: Iterator[tuple[int, Floats]],
    centroids: Floats,
    partitions: npt.NDArray[np.int32],
    measured_on: str,
    min_recall: float,
) -> RetrievalEntry:
    """Return the entry of an index "ivf" with its recall, and the number of partitions that a search reads.

    Args:
        entry: of the index.
        queries: the vectors to measure with, [queries, dim].
        batches: of the candidates: the number of the first, and their vectors.
        centroids: [partitions, dim].
        partitions: of each candidate.
        measured_on: what the queries are.
        min_recall: the share that has to be found. The number of partitions to search is chosen for it.

    Raises:
        ConfigError: there are no queries, they have another width than candidates, or one is not finite.
    """
    check_width(queries.shape[1], centroids.shape[1])
    if not (finite := np.isfinite(queries).all(1)).all():
        raise ConfigError(
            f"queries: {int((~finite).sum())} of the {len(queries)} vectors that the query's tower returned have a value that is "
            "NaN or infinite, so no recall can be measured. Find out why training produced them, or give queries."
        )
    if not len(queries):
        raise ConfigError("queries: there are none. Give at least one.")
    best = true_neighbours(queries, batches, min(entry.k, entry.candidates))
    place = ranks(queries, centroids, partitions[best])
    found = np.bincount(place.ravel(), minlength=entry.partitions).cumsum() / place.size
    nprobe = int(np.argmax(found >= min_recall)) + 1
    steps = {1 << power for power in range(entry.partitions.bit_length())} | {nprobe, entry.partitions}
    return dataclasses.replace(
        entry,
        nprobe=nprobe,
        recall=tuple((step, float(found[step - 1])) for step in sorted(steps)),
        measured_on=measured_on,
        min_recall=float(min_recall),
    )


def inputs_of(names: Collection[str], queries: Any) -> Mapping[str, Any]:
    """Return the inputs that `queries` has for a model with inputs of these names; see export_retrieval."""
    if isinstance(queries, str | Path):
        path = Path(queries)
        if path.suffix not in (".npy", ".npz"):
            raise ConfigError(
                f"queries: {path} is no .npy and no .npz file. Save the arrays with numpy.save or numpy.savez."
            )
        try:
            loaded = np.load(path, allow_pickle=False)
            queries = loaded if path.suffix == ".npy" else dict(loaded)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise ConfigError(f"queries: {path} cannot be read: {reason(error)}.") from None
    if isinstance(queries, Mapping):
        return queries
    if len(names) != 1:
        raise ConfigError(
            f"queries: the model has the inputs {', '.join(sorted(names))}. Give {{input: array}}, or a .npz file."
        )
    return {next(iter(names)): queries}
