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
from tpuembed.files import FilePath
from tpuembed.manifest import MANIFEST_PATH, FileEntry, Manifest, RetrievalEntry
from tpuembed.protobuf import Message, bytes_field, edit_messages, varint, varint_field
from tpuembed.retrieval.opened import OpenedRetrieval, open_retrieval
from tpuembed.retrieval.partitions import Floats, ranks, true_neighbours
from tpuembed.saved_model import GRAPH_FILE, graph_crc32c, replace_file
from tpuembed.saved_model.mapped_paths import edit_nodes

__all__ = [
    "PROBES",
    "QUERIES",
    "RecallReport",
    "check_recall",
    "check_width",
    "inputs_of",
    "measure_recall",
    "measured",
    "sample_of",
    "sample_vectors",
    "with_probes",
]

PROBES: Final = "tpuembed_nprobe"
"""The name of the constants in the graph with the number of partitions that a search reads."""
QUERIES: Final = 1000
"""How many queries the recall is measured with where none are given."""
_NODE_NAME, _NODE_ATTR, _KEY, _VALUE, _ATTR_TENSOR = 1, 5, 1, 2, 8
_TENSOR_DTYPE, _TENSOR_SHAPE, _TENSOR_INTS, _INT32 = 1, 2, 7, 3
"""Source: node_def, attr_value and tensor .proto in tensorflow/core/framework."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallReport:
    """The recall of an export.

    Attributes:
        path: of the version.
        retrieval: its index, with the recall as it was measured now, and the number of partitions that a search reads.
        changed: whether the version has another number of partitions now.
    """

    path: FilePath
    retrieval: RetrievalEntry
    changed: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**dataclasses.asdict(self), "path": str(self.path)}


def measure_recall(path: str | FilePath, *, queries: Any = None, min_recall: float | None = None) -> RecallReport:
    """Measure how many of the `k` best candidates a search of an index "ivf" finds, by the number of partitions it reads.

    Args:
        path: a version, or a MODEL_DIR, whose highest version is used. If its layout is mmap, its files must be where its graph
            maps them from.
        queries: as `export_retrieval` takes them. None for 1,000 of the candidates' own vectors.
        min_recall: write the least number of partitions that finds this share into the version: above 0, at most 1. A server that
            has the version loaded reads as many as before until it loads it again. None changes nothing.

    Raises:
        ConfigError: there is no retrieval at `path`, its index is exact, or the queries do not fit.
    """
    check_recall(min_recall)
    with open_retrieval(path) as found:
        if found.entry.index == "exact":
            raise ConfigError(
                f"{found.version}: its index is exact, so a search finds all. Export with index ivf to search a part."
            )
        vectors = sample_vectors(found, QUERIES) if queries is None else _vectors(found, queries)
        entry = measured(
            found.entry,
            vectors,
            found.batches(),
            found.arrays["centroids"],
            found.partitions(),
            "candidates" if queries is None else "queries",
            min_recall,
        )
        if min_recall is not None:
            if not isinstance(found.version, Path):
                raise ConfigError(
                    f"{found.version}: an export in a store cannot be changed. Leave min_recall out, or change a copy on a disk."
                )
            _write(found.version, found.manifest, entry)
        return RecallReport(path=found.version, retrieval=entry, changed=entry.nprobe != found.entry.nprobe)


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


def sample_of(count: int, most: int) -> npt.NDArray[np.int64]:
    """Return the numbers of `most` of `count` candidates, ascending; all if there are fewer."""
    return np.sort(np.random.default_rng(0).choice(count, min(count, most), replace=False))


def measured(
    entry: RetrievalEntry,
    queries: Floats,
    batches: Iterator[tuple[int, Floats]],
    centroids: Floats,
    partitions: npt.NDArray[np.int32],
    measured_on: str,
    min_recall: float | None,
) -> RetrievalEntry:
    """Return the entry of an index "ivf" with its recall.

    Args:
        entry: of the index.
        queries: the vectors to measure with, [queries, dim].
        batches: of the candidates: the number of the first, and their vectors.
        centroids: [partitions, dim].
        partitions: of each candidate; -1 for one that every search finds.
        measured_on: what the queries are.
        min_recall: choose the number of partitions to search for it; None leaves it.

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
    if entry.metric == "cosine":
        wide = queries.astype(np.float64)
        lengths = np.linalg.norm(wide, axis=1, keepdims=True)
        queries = np.divide(wide, lengths, out=np.zeros_like(wide), where=lengths > 0).astype(np.float32)
    best = true_neighbours(queries, batches, min(entry.k, entry.candidates))
    place = np.maximum(ranks(queries, centroids, partitions[best]), 0)
    found = np.bincount(place.ravel(), minlength=entry.partitions).cumsum() / place.size
    nprobe = entry.nprobe if min_recall is None else int(np.argmax(found >= min_recall)) + 1
    steps = {1 << power for power in range(entry.partitions.bit_length())} | {nprobe, entry.partitions}
    return dataclasses.replace(
        entry,
        nprobe=nprobe,
        recall=tuple((step, float(found[step - 1])) for step in sorted(steps)),
        measured_on=measured_on,
        min_recall=entry.min_recall if min_recall is None else float(min_recall),
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


def sample_vectors(found: OpenedRetrieval, most: int) -> Floats:
    """Return the vectors of `most` of the candidates of an export, [n, dim]; all if there are fewer."""
    chosen = sample_of(found.entry.candidates, most)
    rows = [
        vectors[chosen[(chosen >= first) & (chosen < first + len(vectors))] - first]
        for first, vectors in found.batches()
    ]
    return np.concatenate(rows)


def _vectors(found: OpenedRetrieval, queries: Any) -> Floats:
    """Return the vectors that the export's model makes of the queries."""
    import tensorflow as tf

    specs = found.manifest.signatures["query"]["inputs"]
    inputs = inputs_of(specs, queries)
    if missing := sorted(specs.keys() - inputs.keys()):
        raise ConfigError(
            f"queries: the model takes {missing[0]!r}, which is not among {', '.join(sorted(inputs))}. Add it."
        )
    try:
        loaded = tf.saved_model.load(str(found.version))  # its signatures do not keep its variables
        tensors = {
            name: tf.convert_to_tensor(inputs[name]) if spec.dtype == "string" else tf.cast(inputs[name], spec.dtype)
            for name, spec in specs.items()
        }
        return np.asarray(loaded.signatures["query"](**tensors)["query"])
    except (tf.errors.OpError, TypeError, ValueError, OSError) as error:
        raise ConfigError(f"queries: {found.version} cannot answer them: {' '.join(str(error).split())}") from None


def _write(version: Path, manifest: Manifest, entry: RetrievalEntry) -> None:
    """Write the number of partitions into the graph, and then the entry into the manifest."""
    graph = with_probes((version / GRAPH_FILE).read_bytes(), entry.nprobe, version / GRAPH_FILE)
    replace_file(version / GRAPH_FILE, graph)
    files: dict[str, FileEntry] = dict(manifest.files)
    files[str(GRAPH_FILE)] = FileEntry(size=len(graph), crc32c=graph_crc32c(graph, manifest))
    text = dataclasses.replace(manifest, retrieval=entry, files=files).to_json()
    replace_file(version / MANIFEST_PATH, text.encode())


def with_probes(graph: bytes, nprobe: int, where: Path) -> bytes:
    """Return a graph whose searches read `nprobe` partitions. Raises ConfigError, which names `where`, if it has none."""
    tensor = varint_field(_TENSOR_DTYPE, _INT32) + bytes_field(_TENSOR_SHAPE, b"")
    tensor += bytes_field(_TENSOR_INTS, varint(nprobe))
    attribute = bytes_field(_KEY, b"value") + bytes_field(_VALUE, bytes_field(_ATTR_TENSOR, tensor))
    changed = 0

    def edit(node: bytes) -> bytes:
        nonlocal changed
        if not Message(node).text(_NODE_NAME).startswith(PROBES):
            return node
        changed += 1
        return edit_messages(node, (_NODE_ATTR,), lambda one: attribute if Message(one).data(_KEY) == b"value" else one)

    edited = edit_nodes(graph, PROBES.encode(), edit)
    if not changed:
        raise ConfigError(f"{where}: has no constant {PROBES!r}. Export again.")
    return edited
