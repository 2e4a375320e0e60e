"""Makes a full version of an overlay: streams each stack's base with the changed rows in their places."""

import dataclasses
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tpuembed.errors import ConfigError, ExportError
from tpuembed.export.overlay.writer import FULL_GRAPH
from tpuembed.export.plan.plan import ExportPlan, Placement, StackPlan, format_bytes
from tpuembed.export.publish.assemble import assemble
from tpuembed.export.publish.folder import check_free, locked, publish_folder, temporary_staging
from tpuembed.export.publish.layouts import choose_layout
from tpuembed.export.publish.version_writer import naming_model_dir
from tpuembed.export.report import SavedGraph, StreamReport, VersionReport
from tpuembed.export.retention.listing import check_has_rows, find_version, is_whole, local_model_dir
from tpuembed.export.storage.error import TableError
from tpuembed.export.stream.shard import ignore
from tpuembed.files import FilePath
from tpuembed.formats.saved_model import GRAPH_FILE, file_crc32c, mapped_folders
from tpuembed.formats.saved_model.stack_rows import StackRows
from tpuembed.formats.tensor_bundle import crc
from tpuembed.manifest import MANIFEST_PATH, NAMES_FOLDER, Manifest, StackEntry

__all__ = ["CompactReport", "compact_version"]

_CHUNK_BYTES: Final = 8 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactReport(VersionReport):
    """The result of `compact_version`.

    Attributes:
        source: the overlay that it equals.
        bytes_written: bytes of its tables.
        bytes_reused: the part of them that is shared with the base.
    """

    source: int
    bytes_written: int
    bytes_reused: int


def compact_version(
    model_dir: str | FilePath,
    version: int | None = None,
    *,
    on_progress: Callable[[int, int], None] = ignore,
) -> CompactReport:
    """Publish an overlay of `model_dir` again as a full version, under the next number. No version is removed.

    It takes bounded memory and imports no TensorFlow. Each data file is compared with the checksum that a full export
    of the same rows has. Later exports with `base="latest"` are overlays of the new version.

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
    check_has_rows(folder, "compact")
    source = find_version(folder, version)
    manifest = Manifest.read(source)
    if manifest is None or manifest.base is None:
        raise ConfigError(f"version {source}: is no overlay, so there is nothing to compact. Choose an overlay.")
    if not is_whole(source):
        raise ConfigError(f"version {source}: is incomplete. Choose another version.")
    total = sum(stack.rows * stack.row_bytes for stack in manifest.stacks)
    needed = sum(stack.rows * stack.row_bytes for stack in manifest.stacks if stack.overlay is not None)
    with (
        naming_model_dir(folder),
        temporary_staging(folder, "compact", source.name) as staging,
        locked(source, fcntl.LOCK_SH),
    ):
        check_free(folder, None)
        free = shutil.disk_usage(staging).free
        if free < needed:
            raise ExportError(
                f"MODEL_DIR {folder}: a full version needs {format_bytes(needed)} ({needed} bytes), but its disk has "
                f"{format_bytes(free)} ({free} bytes) free. Free space."
            )
        tables, done, crc32c = staging / "tables", 0, dict[str, int]()
        tables.mkdir()

        def count(size: int) -> None:
            nonlocal done
            done += size
            on_progress(done, total)

        for stack in manifest.stacks:
            data = tables / f"{stack.name}.data"
            if stack.overlay is None:
                os.link((source / stack.file).resolve(), data)
                _check(source, data.name, file_crc32c(data, count), stack.crc32c)
                crc32c[stack.name] = stack.crc32c
            else:
                crc32c[stack.name] = _merge(source, stack, data, count)
        streamed = StreamReport(
            folder=tables,
            crc32c=crc32c,
            bytes_written=total,
            bytes_reused=total - needed,
            errors={table: TableError(**error) for table, error in manifest.errors.items()},
        )
        graph = SavedGraph(
            array_keys={stack.name: stack.key for stack in manifest.stacks},
            signatures=manifest.signatures,
            features=manifest.features,
            vocabularies=manifest.vocabularies,
            padding=manifest.padding,
            packing=manifest.packing,
            from_activations=manifest.from_activations,
            names=manifest.names,
        )
        target, layout = staging / "version", choose_layout(manifest.layout, folder, _root(source, manifest))
        shutil.copytree(source / FULL_GRAPH, target)
        if (source / NAMES_FOLDER).is_dir():
            shutil.copytree(source / NAMES_FOLDER, target / NAMES_FOLDER)
        extra, own = FULL_GRAPH.parent, [FULL_GRAPH.name, MANIFEST_PATH.name]
        shutil.copytree(
            source / extra, target / extra, ignore=lambda place, _: own if Path(place) == source / extra else []
        )
        made = assemble(target, _plan_of(manifest), layout, streamed, graph, manifest.source, manifest.histories)
        path = publish_folder(target, folder, None, lambda name: layout.settle(target, made, name))
    return CompactReport(
        path=path,
        version=int(path.name),
        source=int(source.name),
        bytes_written=total,
        bytes_reused=total - needed,
    )


def _merge(source: Path, stack: StackEntry, path: Path, on_written: Callable[[int], None]) -> int:
    """Write the rows of a stack into the file `path`, those of its overlay in their places, and return its CRC32C."""
    assert stack.overlay is not None
    if stack.overlay.crc32c is None:  # the rows were found by stamps, so nobody has read all of them
        for array in stack.arrays:
            _check(source, array.file, file_crc32c(source / array.file), array.crc32c)
    rows, merged, step = StackRows(source, stack), 0, max(1, _CHUNK_BYTES // stack.row_bytes)
    with open(path, "xb") as file:
        for first in range(0, stack.rows, step):
            piece = rows.read(first, min(step, stack.rows - first)).reshape(-1)
            merged = crc.extend(merged, piece)
            file.write(piece.data)
            on_written(len(piece))
    _check(source, path.name, merged, merged if stack.overlay.crc32c is None else stack.overlay.crc32c)
    return merged


def _check(source: Path, file: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise ExportError(
            f"version {source}: the rows of {file} have the CRC32C {found:#010x}, but those that were exported have "
            f"{wanted:#010x}. Verify it: tpuembed verify."
        )


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
