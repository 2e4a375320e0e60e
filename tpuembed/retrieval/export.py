"""Exports a retrieval: candidates, their index, and the query's model as one version."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tpuembed.checkpoint import Checkpoint, open_checkpoint
from tpuembed.config.checks import check_choice, check_count
from tpuembed.errors import ConfigError, reason
from tpuembed.export.options import ExportOptions
from tpuembed.export.publish.folder import temporary_staging
from tpuembed.export.publish.version_writer import naming_model_dir
from tpuembed.export.report import ExportReport
from tpuembed.export.request import ExportRequest, saving
from tpuembed.export.run import Progress, run_export, source_of
from tpuembed.export.stream.shard import Source, check_unchanged
from tpuembed.files import FilePath, as_path
from tpuembed.manifest import RetrievalEntry
from tpuembed.retrieval.candidates import CandidateBatch, Candidates, array_of, collect, of_array, of_table, of_tower
from tpuembed.retrieval.partitions import (
    BLOCK_ROWS,
    CENTROID_ROWS,
    Floats,
    assign,
    centroids_of,
    count_for,
    in_order,
)
from tpuembed.retrieval.reader import ORDER, WithCandidates
from tpuembed.retrieval.recall import QUERIES, check_recall, inputs_of, measured

if TYPE_CHECKING:
    from tpuembed.export.graph.keras_model import Factory
    from tpuembed.retrieval.towers import Tower

__all__ = ["export_retrieval"]

_INDEXES: Final = ("auto", "exact", "ivf")
_MOST_EXACT: Final = 200_000
"""With "auto", more candidates get an index "ivf"."""
_MIN_RECALL: Final = 0.95
_TABLE: Final = "table:"
_OWN_OPTIONS: Final = ("k", "index", "ids", "tags", "queries", "min_recall")


def export_retrieval(
    checkpoint: str | Path,
    model_dir: str | FilePath,
    *,
    query: "str | Factory",
    candidates: Any,
    k: int = 100,
    index: str = "auto",
    ids: Any = None,
    tags: Any = None,
    queries: Any = None,
    min_recall: float | None = None,
    on_progress: Progress | None = None,
    checkpoint_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ExportReport:
    """Write `model_dir`/<version>/, a SavedModel that finds the best `k` candidates for a query.

    Its signature `serving_default` takes the query's inputs, and returns `ids` [batch, k] and `scores` float32 [batch, k], the
    best first. `filtered` also takes `exclude`, ids [batch, n] padded with -1 or "", and `require_tags`, uint64 [batch]: a
    candidate passes if it has all of these bits, and 0 asks for nothing. If fewer than `k` candidates are left, the rest of the
    ids is -1 or "", with the score -infinity. `query` returns the vector of the query.

    Args:
        checkpoint: as `export_saved_model` takes it.
        model_dir: as `export_saved_model` takes it.
        query: a function that builds the query's tower, a Keras model with one output, float32 [batch, dim]. Or its name as
            "MODULE:FACTORY". Weights of the checkpoint that the tower does not have are left out.
        candidates: "table:NAME" for the rows of a table of the checkpoint. Or an array [n, dim], or the path of a .npy file. Or a
            function, or "MODULE:FACTORY", that returns (the candidates' tower, a dataset of batches): dicts of the tower's inputs,
            `id` and perhaps `tags`. For a tower with inputs of these names they may be called `candidate_id` and `candidate_tags`.
        k: how many candidates a request gets.
        index: "exact" compares a query with all candidates. "ivf" compares it with those in the partitions that are nearest to
            it. "auto" is "ivf" for more than 200,000 candidates.
        ids: of the candidates of a table or an array: int64 or strings, [n], or a .npy file, or a file with a string per line. None
            for the rows' names of a table with a vocabulary, and else their numbers.
        tags: of the same candidates: uint64 [n], a bit for each tag, or a .npy file.
        queries: inputs of the query's tower, to measure the recall of an index "ivf" with: {name: array}, or an array for the only
            input. Or their .npy file, or a .npz file with an array for each name. None for 1,000 rows of the table that the query
            looks up in, if its only input is an id of one table, else 1,000 candidates.
        min_recall: the share of the `k` best candidates that a search of an index "ivf" has to find on average, above 0 and at most
            1. The number of partitions to search is chosen for it. None is 0.95.
        on_progress: called with (bytes done, bytes in total) of the tables and the candidates.
        checkpoint_options: further arguments of `open_checkpoint`.
        options: as `export_saved_model` takes them, but for those of overlays: each version has a full index. The candidates are
            the table "candidates" in `storage`.

    Raises:
        TpuEmbedError: the export failed, and nothing was published.
    """
    check_count("k", k)
    check_choice("index", index, _INDEXES)
    check_recall(min_recall)
    chosen = ExportOptions.of("export_retrieval", options, without=("base",), others=_OWN_OPTIONS)
    with (
        open_checkpoint(checkpoint, **(checkpoint_options or {})) as opened,
        _working_folder(model_dir) as folder,
    ):
        source = source_of(opened)  # before anything is read
        found = collect(_batches(opened, candidates, ids, tags), folder)
        check_unchanged(opened, source)
        table = "candidates" if "candidates" not in opened.tables() else "candidates_index"
        made = _Index.of(found, table, index, k, chosen.max_memory_bytes)
        if made.entry.index == "ivf":
            made = made.tuned(opened, query, queries, _MIN_RECALL if min_recall is None else min_recall)
        elif queries is not None:
            raise ConfigError(
                'queries: they measure the recall of an index "ivf", and this one is exact. Leave them out.'
            )
        digest = f"{found.digest} {made.entry.index} {made.entry.partitions}"
        tables = WithCandidates(opened, table, folder, found.dim, digest)
        request = _request(tables, tables.source(source.fingerprint), query, made)
        return run_export(request, model_dir, chosen, on_progress)


@contextlib.contextmanager
def _working_folder(model_dir: str | FilePath) -> Iterator[Path]:
    """Yield a folder for the candidates: on the disk of `model_dir`, or of temporary files if that is a store."""
    path = as_path(model_dir)
    if not isinstance(path, Path):
        with tempfile.TemporaryDirectory(prefix="tpuembed-candidates-") as folder:
            yield Path(folder)
        return
    existed = path.exists()
    try:
        with naming_model_dir(path):
            path.mkdir(parents=True, exist_ok=True)
            with temporary_staging(path, "candidates", str(os.getpid())) as staging:
                yield staging
    finally:
        if not existed:
            with contextlib.suppress(OSError):  # it has a version, or another export's folder
                path.rmdir()


def _batches(checkpoint: Checkpoint, candidates: Any, ids: Any, tags: Any) -> Iterator[CandidateBatch]:
    """Return the candidates that `candidates` names."""
    given_ids, given_tags = array_of("ids", ids), array_of("tags", tags)
    if isinstance(candidates, str) and candidates.startswith(_TABLE):
        return of_table(checkpoint, candidates.removeprefix(_TABLE), given_ids, given_tags)
    if isinstance(candidates, str | Path) and Path(candidates).suffix == ".npy":
        try:
            vectors = np.load(candidates, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"candidates {candidates}: cannot be read: {reason(error)}.") from None
        return of_array(vectors, given_ids, given_tags)
    if isinstance(candidates, np.ndarray):
        return of_array(candidates, given_ids, given_tags)
    if not callable(candidates) and not (isinstance(candidates, str) and ":" in candidates):
        raise ConfigError(
            f'candidates: expected "table:NAME", "MODULE:FACTORY", a function, an array or a .npy file, got {candidates!r}.'
        )
    for what, value in (("ids", ids), ("tags", tags)):
        if value is not None:
            raise ConfigError(f"{what}: those of a tower's candidates come with its dataset. Leave {what} out.")
    from tpuembed.export.graph.keras_model import import_factory
    from tpuembed.retrieval.towers import Tower

    factory = import_factory(candidates) if isinstance(candidates, str) else candidates
    parts: list[Any] = []

    def tower() -> Any:
        made = factory()
        if not isinstance(made, tuple) or len(made) != 2 or not hasattr(made[1], "__iter__"):
            raise ConfigError(
                f"candidates: the function returned {type(made).__name__}. Return (the tower, a dataset of batches)."
            )
        parts.append(made[1])
        return made[0]

    built = Tower(checkpoint, tower)
    return of_tower(built, parts[0])


@dataclasses.dataclass(frozen=True)
class _Index:
    """The index of collected candidates."""

    candidates: Candidates
    entry: RetrievalEntry
    arrays: Mapping[str, npt.NDArray[Any]]
    partitions: npt.NDArray[np.int32]

    @classmethod
    def of(cls, candidates: Candidates, table: str, index: str, k: int, max_memory_bytes: int) -> "_Index":
        """Divide the candidates into partitions, or one for an exact index, and write their order."""
        kind = ("ivf" if candidates.count > _MOST_EXACT else "exact") if index == "auto" else index
        folder, count = candidates.folder, count_for(candidates.count) if kind == "ivf" else 1
        partitions = np.lib.format.open_memmap(folder / "partitions.npy", "w+", np.int32, (candidates.count,))
        arrays: dict[str, npt.NDArray[Any]] = {}
        if kind == "ivf":
            most = max(count, max_memory_bytes // (4 * 4 * candidates.dim))
            arrays["centroids"] = centroids_of(_sample(candidates, min(most, CENTROID_ROWS * count)), count)
            for start, vectors in candidates.batches():
                partitions[start : start + len(vectors)] = assign(vectors, arrays["centroids"])
        first = in_order(partitions, count, lambda size: np.memmap(folder / ORDER, np.int64, "w+", shape=(size,)))
        order = np.memmap(folder / ORDER, np.int64, "r")
        if kind == "ivf":
            arrays["first_blocks"] = first
        is_text = candidates.ids.dtype == object
        if is_text:
            lengths = np.fromiter(map(len, candidates.ids.tolist()), np.int64, candidates.count)
            names = np.frombuffer(b"".join(candidates.ids.tolist()), np.uint8)
            arrays |= {"ids": order, "names": names, "offsets": np.concatenate([[0], np.cumsum(lengths)])}
        else:
            arrays["ids"] = _placed(order, candidates.ids, -1)
        if candidates.tags is not None:
            arrays["tags"] = _placed(order, candidates.tags.view(np.int64), 0)
        entry = RetrievalEntry(
            table=table,
            candidates=candidates.count,
            k=k,
            index=kind,
            ids="string" if is_text else "int64",
            has_tags=candidates.tags is not None,
            block_rows=BLOCK_ROWS,
            partitions=count if kind == "ivf" else 0,
            nprobe=1 if kind == "ivf" else 0,
        )
        return cls(candidates, entry, arrays, partitions)

    def tuned(self, checkpoint: Checkpoint, query: "str | Factory", queries: Any, min_recall: float) -> "_Index":
        """Measure the recall by the number of partitions, and choose the least number for `min_recall`."""
        from tpuembed.retrieval.towers import Tower

        vectors, measured_on = _query_vectors(Tower(checkpoint, query), queries, self.candidates)
        entry = measured(
            self.entry,
            vectors,
            self.candidates.batches(),
            self.arrays["centroids"],
            self.partitions,
            measured_on,
            min_recall,
        )
        return dataclasses.replace(self, entry=entry)


def _placed(order: npt.NDArray[np.int64], values: npt.NDArray[Any], padding: int) -> npt.NDArray[np.int64]:
    """Return `values` in `order`, and `padding` at the places of padding."""
    return np.where(order < 0, padding, values[np.maximum(order, 0)])


def _sample(candidates: Candidates, most: int) -> Floats:
    """Return `most` of the vectors, or all if there are fewer."""
    chosen = np.random.default_rng(0).choice(candidates.count, min(candidates.count, most), replace=False)
    return np.array(candidates.vectors[np.sort(chosen)])


def _query_vectors(tower: "Tower", queries: Any, candidates: Candidates) -> tuple[Floats, str]:
    """Return the vectors to measure the recall with, and what they are of."""
    if queries is not None:
        return tower(inputs_of(tower.input_names, queries)), "queries"
    own = tower.own_rows(QUERIES)
    if own is not None:
        with contextlib.suppress(ConfigError):  # the input is something else than rows of that table
            return tower(own), "rows"
    return _sample(candidates, QUERIES), "candidates"


def _request(checkpoint: WithCandidates, source: Source, query: "str | Factory", index: _Index) -> ExportRequest:
    from tpuembed.export.graph.dense_weights import restore_dense_weights
    from tpuembed.export.graph.keras_model import build_model
    from tpuembed.export.graph.signature import quantization_of
    from tpuembed.export.graph.stacked_tables import StackedTables
    from tpuembed.retrieval.graph import RetrievalModel

    stacked = StackedTables.of(checkpoint)
    tower = build_model(query, stacked)
    tower.compare_vocabularies(checkpoint.path, stacked.given_names(checkpoint))
    tower.check_features(checkpoint.path, checkpoint.layer_config, None)

    def dense() -> list[Any]:
        restore_dense_weights(tower.model, checkpoint, stacked.required, allow_unused_weights=True)
        return tower.state()

    return ExportRequest(
        checkpoint=checkpoint,
        source=source,
        tables=[*stacked.required, index.entry.table],
        save_graph=saving(RetrievalModel(tower, stacked, index.entry, index.arrays), stacked, dense),
        is_model=True,
        whole_tables=stacked.read_whole,
        index_tables=[index.entry.table],
        quantization=quantization_of(checkpoint.layer_config, stacked.quantization, {}),
    )
