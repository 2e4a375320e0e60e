"""Makes a full version of an overlay: streams each stack's base with the changed rows in their places."""

import contextlib
import dataclasses
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError, ExportError
from tpuembed.export.formatting import format_bytes
from tpuembed.export.overlay.full_graph import FULL_GRAPH, take_full_graph
from tpuembed.export.plan.plan import ExportPlan, Placement, StackPlan
from tpuembed.export.publish.assemble import assemble
from tpuembed.export.publish.folder import abandoned, check_free, lock_folder, locked, publish_folder
from tpuembed.export.publish.layouts import Layout, choose_layout
from tpuembed.export.publish.version_writer import PREFIX, naming_model_dir
from tpuembed.export.report import StreamReport
from tpuembed.export.retention.listing import is_whole, local_model_dir, version_folders
from tpuembed.export.storage.error import TableError
from tpuembed.export.stream.shard import ignore
from tpuembed.files import FilePath, flush
from tpuembed.files.links import clone
from tpuembed.manifest import ArrayEntry, Manifest, StackEntry
from tpuembed.saved_model import GRAPH_FILE, file_crc32c, mapped_folders
from tpuembed.saved_model.stack_rows import StackRows
from tpuembed.tensor_bundle import crc

if TYPE_CHECKING:
    from tpuembed.export.graph.saved_model import SavedGraph

__all__ = ["CompactReport", "compact_version"]

_Bytes = npt.NDArray[np.uint8]

_CHUNK_BYTES: Final = 8 << 20
_BLOCK_BYTES: Final = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactReport:
    """The result of `compact_version`.

    Attributes:
        path: of the new version.
        version: its number.
        source: the overlay that it equals.
        bytes_written: bytes of its tables.
        bytes_reused: the part of them that an interrupted run had written, or that is shared with the base.
    """

    path: Path
    version: int
    source: int
    bytes_written: int
    bytes_reused: int

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**dataclasses.asdict(self), "path": str(self.path)}


def compact_version(
    model_dir: str | FilePath,
    version: int | None = None,
    *,
    on_progress: Callable[[int, int], None] = ignore,
) -> CompactReport:
    """Publish an overlay of `model_dir` again as a full version, under the next number. No version is removed.

    It takes bounded memory and imports no TensorFlow. Each data file is compared with the checksum that a full export
    of the same rows has. A run that is interrupted is resumed by the next one. Later exports with `base="latest"` are
    overlays of the new version.

    Args:
        model_dir: a folder of a disk.
        version: an overlay in it; None for the newest version.
        on_progress: called with (bytes done, bytes in total).

    Raises:
        ConfigError: `model_dir` is not a folder of this machine; it has no such version; or that is incomplete or no
            overlay.
        ExportError: a file is damaged, or `model_dir` has no room or cannot be written. Nothing was published.
    """
    folder = local_model_dir(model_dir, "compact")
    paths = dict(version_folders(folder))
    number = max(paths) if version is None else version
    if number not in paths:
        has = ", ".join(map(str, sorted(paths)))
        raise ConfigError(f"MODEL_DIR {folder}: has no version {number}. It has {has}. Choose one of these.")
    source = paths[number]
    manifest = Manifest.read(source)
    if manifest is None or manifest.base is None:
        raise ConfigError(f"version {source}: is no overlay, so there is nothing to compact. Choose an overlay.")
    if not is_whole(source):
        raise ConfigError(f"version {source}: is incomplete. Choose another version.")
    staging = folder / f"{PREFIX}compact-{number}"
    with naming_model_dir(folder), contextlib.ExitStack() as locks:
        with locked(folder):
            staging.mkdir(exist_ok=True)
            try:
                locks.callback(os.close, lock_folder(staging, fcntl.LOCK_EX | fcntl.LOCK_NB))
            except BlockingIOError:
                raise ExportError(f"version {source}: another process compacts it. Wait until it has ended.") from None
            locks.callback(os.close, lock_folder(source, fcntl.LOCK_SH))
            left = dict(abandoned(folder, "compact-"))
        for path, lock in left.items():  # of other versions
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
        path, reused = _write_full(source, manifest, staging, folder, on_progress)
        shutil.rmtree(staging, ignore_errors=True)
    return CompactReport(
        path=path,
        version=int(path.name),
        source=number,
        bytes_written=sum(stack.rows * stack.row_bytes for stack in manifest.stacks),
        bytes_reused=reused,
    )


def _write_full(
    source: Path, manifest: Manifest, staging: Path, model_dir: Path, on_progress: Callable[[int, int], None]
) -> tuple[Path, int]:
    """Publish the overlay `source` as the next version of `model_dir`, a full one.

    `staging` may have the files of an interrupted run.

    Returns:
        The path of the new version, and the bytes of tables that were there already, or are shared with the base.

    Raises:
        ExportError: a file is damaged, or there is no room. Nothing was published.
    """
    check_free(model_dir, None)
    total = sum(stack.rows * stack.row_bytes for stack in manifest.stacks)
    tables = staging / "tables"
    tables.mkdir(exist_ok=True)
    needed = sum(_begin_stack(source, stack, tables) for stack in manifest.stacks)
    free = shutil.disk_usage(staging).free
    if free < needed:
        raise ExportError(
            f"MODEL_DIR {model_dir}: a full version needs {format_bytes(needed)} ({needed} bytes), but its disk has "
            f"{format_bytes(free)} ({free} bytes) free. Free space."
        )
    done = reused = 0

    def count(size: int) -> None:
        on_progress(done + size, total)

    crc32c = {}
    for stack in manifest.stacks:
        crc32c[stack.name], kept = _write_stack(source, stack, manifest, tables, count)
        done += stack.rows * stack.row_bytes
        reused += kept
    writer = _FullWriter(source, manifest, staging, model_dir)
    streamed = StreamReport(
        folder=tables,
        crc32c=crc32c,
        bytes_written=total,
        bytes_reused=reused,
        errors={table: TableError(**error) for table, error in manifest.errors.items()},
        seconds=0.0,
        worker_peak_rss_bytes=0,
    )
    graph = _graph_of(manifest)
    return assemble(writer, streamed, graph, manifest.source, manifest.histories), reused  # type: ignore[arg-type, return-value]


def _begin_stack(source: Path, stack: StackEntry, folder: Path) -> int:
    """Make the data file of a stack, without a copy of the base's bytes if that is possible. Return the bytes it lacks.

    A stack without changes is a link of the base's file. With changes it shares that file's blocks, where the file system
    can do that. Otherwise it is empty, or what an interrupted run has left.
    """
    path, base = folder / f"{stack.name}.data", (source / stack.file).resolve()
    size = stack.rows * stack.row_bytes
    if path.exists() and path.stat().st_nlink > 1:  # a run that was killed at its end has published the file
        path.unlink()
    if stack.overlay is None:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.hardlink_to(base)
            return 0
    if not path.exists() and clone(base, path):
        changed = 0 if stack.overlay is None else stack.overlay.rows.rows
        return min(size, changed * (stack.row_bytes + 2 * _BLOCK_BYTES))
    path.touch()
    return max(0, size - path.stat().st_size)


def _write_stack(
    source: Path, stack: StackEntry, manifest: Manifest, folder: Path, on_written: Callable[[int], None]
) -> tuple[int, int]:
    """Write all rows of a stack into its file in `folder`, where they differ from what is there.

    Returns:
        Their CRC32C, and the number of bytes that were there already.
    """
    path = folder / f"{stack.name}.data"
    if path.stat().st_nlink > 1:  # it is the base's file
        reused, wanted = stack.size, stack.crc32c
    else:
        reused, wanted = _merge(source, stack, manifest, path, on_written)
        flush(path)
    found = file_crc32c(path)
    if found != wanted:
        path.unlink()
        raise ExportError(
            f"version {source}: the rows of stack {stack.name!r} have the CRC32C {found:#010x}, but those that were exported have "
            f"{wanted:#010x}. Verify it: tpuembed verify."
        )
    return found, reused


def _merge(
    source: Path, stack: StackEntry, manifest: Manifest, path: Path, on_written: Callable[[int], None]
) -> tuple[int, int]:
    """Write the rows of a stack into the file `path`. Return how many bytes were there already, and the wanted CRC32C."""
    expected = stack.crc32c if stack.overlay is None else stack.overlay.crc32c
    if expected is None:  # the rows were found by stamps, so nobody has read all of them
        for array in stack.arrays:
            _check_file(source, array)
    rows, reused, written, merged = StackRows(source, manifest, stack), 0, 0, 0
    step = max(1, _CHUNK_BYTES // stack.row_bytes)
    with open(path, "r+b", buffering=0) as file:
        for first in range(0, stack.rows, step):
            piece = rows.read(first, min(step, stack.rows - first)).reshape(-1)
            merged = crc.extend(merged, piece)
            there = os.pread(file.fileno(), len(piece), written)
            for start, stop in _runs_of_blocks(np.frombuffer(there, np.uint8), piece, written):
                _write_at(file.fileno(), piece.data[start:stop], written + start)
                reused -= stop - start
            written += len(piece)
            reused += len(piece)
            on_written(written)
        file.truncate(written)
    return reused, merged if expected is None else expected


def _runs_of_blocks(there: _Bytes, wanted: _Bytes, offset: int) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of `wanted`, the bytes of a file from `offset` on, that must be written where `there` lie.

    These are whole blocks of the file system, because the others stay shared with a file that it was cloned from.
    """
    if len(there) < len(wanted):
        yield 0, len(wanted)
        return
    blocks = np.unique((np.flatnonzero(there != wanted) + offset) // _BLOCK_BYTES)
    for run in np.split(blocks, np.flatnonzero(np.diff(blocks) > 1) + 1):
        if len(run):
            yield (
                max(0, int(run[0]) * _BLOCK_BYTES - offset),
                min(len(wanted), int(run[-1] + 1) * _BLOCK_BYTES - offset),
            )


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _check_file(source: Path, array: ArrayEntry) -> None:
    path = source / array.file
    found = file_crc32c(path)
    if found != array.crc32c:
        raise ExportError(
            f"version {source}: its file {path.name} has the CRC32C {found:#010x}, but it was written with {array.crc32c:#010x}. "
            "Verify it: tpuembed verify."
        )


class _FullWriter:
    """What `assemble` needs of a VersionWriter."""

    tables_key = ""

    def __init__(self, source: Path, manifest: Manifest, staging: Path, model_dir: Path) -> None:
        self.plan = _plan_of(manifest)
        self.path = staging / "version"
        self._model_dir = model_dir
        self.layout: Layout = choose_layout(manifest.layout, model_dir, _root(source, manifest))
        shutil.rmtree(self.path, ignore_errors=True)
        take_full_graph(source, self.path)
        (self.path / FULL_GRAPH.parent / "tpuembed.json").unlink(missing_ok=True)

    def publish(self, settle: Callable[[str], None]) -> Path:
        return publish_folder(self.path, self._model_dir, None, settle)


def _plan_of(manifest: Manifest) -> ExportPlan:
    """Return the plan of a full version with the tables of `manifest`, without shards."""
    stacks = [
        StackPlan(
            name=stack.name,
            dim=stack.dim,
            storage=stack.storage,
            rows=stack.rows,
            size=stack.rows * stack.row_bytes,
            tables=tuple(
                Placement(
                    table=table.name,
                    rows=table.rows,
                    row_offset=table.row_offset,
                    source_dtype=table.dtype,
                    quantization=None if table.quantization is None else dataclasses.asdict(table.quantization),
                )
                for table in manifest.tables
                if table.stack == stack.name
            ),
        )
        for stack in manifest.stacks
    ]
    return ExportPlan(
        layout=manifest.layout,
        workers=1,
        max_memory_bytes=_CHUNK_BYTES,
        stacks=tuple(stacks),
        shards=(),
        require_finite=manifest.finite,
    )


@dataclasses.dataclass(frozen=True)
class _Graph:
    """What `assemble` needs of a SavedGraph."""

    array_keys: dict[str, str]
    signatures: Any
    features: Any
    vocabularies: Any
    padding: Any
    packing: Any
    from_activations: Any
    names: Any
    retrieval: Any


def _graph_of(manifest: Manifest) -> "SavedGraph":
    graph: Any = _Graph(
        array_keys={stack.name: stack.key for stack in manifest.stacks},
        signatures=manifest.signatures,
        features=manifest.features,
        vocabularies=manifest.vocabularies,
        padding=manifest.padding,
        packing=manifest.packing,
        from_activations=manifest.from_activations,
        names=manifest.names,
        retrieval=None,
    )
    return graph


def _root(source: Path, manifest: Manifest) -> str | None:
    """Return MODEL_DIR as the graph of `source` names it; None for a layout without paths."""
    if manifest.layout != "mmap":
        return None
    folders = mapped_folders((source / GRAPH_FILE).read_bytes(), manifest)
    if len(folders) != 1:
        raise ConfigError(
            f"version {source}: its graph maps tables from {', '.join(sorted(folders))}. Relocate it first: tpuembed "
            "relocate VERSION ROOT."
        )
    return str(Path(folders.pop()).parent)
