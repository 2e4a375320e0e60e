"""Verifies every checksum of a checkpoint or export, in bounded memory."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpuembed.checkpoint import find_format, open_checkpoint
from tpuembed.checkpoint.bundle.checkpoint import BundleCheckpoint
from tpuembed.checkpoint.keras.archive import opened_archive
from tpuembed.checkpoint.keras.weights import open_window
from tpuembed.checkpoint.location import find_bundle
from tpuembed.checkpoint.tools.exports import find_export
from tpuembed.checkpoint.types import Checkpoint
from tpuembed.errors import CheckpointCorruptError, CheckpointError, ConfigError
from tpuembed.files import FilePath, as_path, names_below, versions
from tpuembed.formats.saved_model import GRAPH_FILE, file_crc32c, graph_crc32c, mapped_folders, size_faults
from tpuembed.formats.tensor_bundle import Bundle
from tpuembed.formats.tensor_bundle.verification import Damage, damaged_parts, unchecked_keys
from tpuembed.manifest import MANIFEST_PATH, Manifest

__all__ = ["VerifyReport", "verify_files"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""

_PIECE_BYTES, _MEMBER_PIECE_BYTES = 16 << 20, 1 << 20
_VARIABLES = Path("variables") / "variables"
_FREE = MANIFEST_PATH.parent.name
"""A folder that may have other files: warm-up records, notes of a deployment."""

OnRead = Callable[[int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The result of a verification.

    Attributes:
        path: the bundle's prefix, the export's version, or the checkpoint's path.
        entries: number of tensors, or stacks and tables, that were checked.
        bytes: number of bytes that were read.
        damaged: what differs from what was written; empty for intact files.
        unchecked: parts without a known checksum, in sentences; damage to their bytes is not noticed.
    """

    path: str
    entries: int
    bytes: int
    damaged: tuple[Damage, ...]
    unchecked: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return dataclasses.asdict(self)


def verify_files(
    path: str | FilePath,
    *,
    checkpoint_options: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> VerifyReport:
    """Read everything at `path` and compare it with its checksums.

    A tensor bundle is checked entry by entry, for all kinds of entries. An export is checked file by file, as its
    manifest lists them, and its tensors also against the bundle's index. A `.keras` file is checked file by file, as a
    zip archive. Formats without checksums are only read, and the report says so.

    Args:
        path: a checkpoint as for `open_checkpoint`; a version of an export, or its MODEL_DIR.
        checkpoint_options: further arguments of `open_checkpoint`. Bundles and exports do not need them.
        on_progress: called with (bytes done, total bytes).

    Raises:
        TpuEmbedError: there is nothing to verify, or the metadata that leads to the bytes is itself damaged.
    """
    counter = _Counter(on_progress)
    export = find_export(path)
    if export:
        counter.total = _total_bytes(export[1])
        return _verify_export(*export, counter)
    try:
        # What `open_checkpoint` would read, even if it has no tables.
        prefix = find_bundle(as_path(path)) if find_format(as_path(path)) is BundleCheckpoint else None
    except (OSError, ValueError):  # no permission, or a name too long: `open_checkpoint` raises the same error
        prefix = None
    if prefix is not None:
        with Bundle.open(prefix) as bundle:
            unchecked = unchecked_keys(bundle)
            entries = [entry for key, entry in bundle.entries.items() if key not in unchecked]
            counter.total = sum(part.size for entry in entries for part in entry.parts())
            return VerifyReport(
                path=str(prefix),
                entries=len(bundle.entries),
                bytes=counter.total,
                damaged=tuple(damaged_parts(bundle, counter)),
                unchecked=tuple(
                    f"tensor {key!r}: has dtype variant, whose checksum is not supported" for key in unchecked
                ),
            )
    with open_checkpoint(path, **(checkpoint_options or {})) as checkpoint:
        if checkpoint.path.endswith(".keras"):
            report = _verify_archive(checkpoint.path, counter)
        else:
            report = _read_through(checkpoint, counter)
        damaged = list(report.damaged)
        for table in checkpoint.tables():
            try:
                checkpoint.vocabulary(table)
            except CheckpointCorruptError as error:
                damaged.append(Damage(f"vocabulary of table {table!r}", checkpoint.path, str(error)))
        return dataclasses.replace(report, damaged=tuple(damaged))


class _Counter:
    """Counts the bytes read, and reports progress."""

    def __init__(self, on_progress: Progress | None) -> None:
        self._on_progress, self.done, self.total = on_progress, 0, 0

    def __call__(self, count: int) -> None:
        self.done += count
        if self._on_progress:
            self._on_progress(self.done, self.total)


def _verify_archive(path: str, counter: _Counter) -> VerifyReport:
    """Verify a `.keras` file: a zip archive has a CRC32 of every file in it."""
    window, damaged = open_window(as_path(path)), []
    with contextlib.closing(window.file):
        with opened_archive(window) as archive:
            sizes = {member.filename: member.file_size for member in archive.infolist()}
        counter.total = sum(sizes.values())
        for name in sizes:
            try:
                with opened_archive(window) as archive, archive.open(name) as member:
                    while piece := member.read(_MEMBER_PIECE_BYTES):
                        counter(len(piece))
            except CheckpointCorruptError as error:
                damaged.append(Damage(name, path, str(error)))
    return VerifyReport(path=path, entries=len(sizes), bytes=counter.done, damaged=tuple(damaged))


def _read_through(checkpoint: Checkpoint, counter: _Counter) -> VerifyReport:
    """Read every row of a format without checksums."""
    arrays = [(info, slot) for info in checkpoint.tables().values() for slot in (None, *info.slots)]
    counter.total = sum(info.rows * info.dim * info.dtype.itemsize for info, _ in arrays)
    damaged = []
    for info, slot in arrays:
        step = max(1, _PIECE_BYTES // max(1, info.dim * info.dtype.itemsize))
        buffer = np.empty((min(step, info.rows), info.dim), info.dtype)
        try:
            for start in range(0, info.rows, step):
                piece = buffer[: info.rows - start]
                checkpoint.read_into(info.name, start, piece, slot)
                counter(piece.nbytes)
        except CheckpointError as error:
            name = info.name if slot is None else f"{info.name}/{slot}"
            damaged.append(Damage(name, checkpoint.path, str(error)))
    unchecked = (
        f"format {checkpoint.format} has no checksums of rows: they were read, but damage to them is not noticed"
    )
    return VerifyReport(
        path=checkpoint.path,
        entries=len(arrays),
        bytes=counter.done,
        damaged=tuple(damaged),
        unchecked=(unchecked,),
    )


def _verify_export(version: FilePath, manifest: Manifest, on_read: OnRead) -> VerifyReport:
    """Read all of `version` and compare it with `manifest`, which lists all files of the export."""
    stacks = list(_damaged_stacks(version, manifest, on_read))
    files = list(_damaged_files(version, manifest, on_read))
    tensors = [] if stacks or files else list(_damaged_tensors(version, manifest))
    known = {MANIFEST_PATH.as_posix(), *manifest.files, *manifest.table_files()}
    unlisted = sorted(name for name in names_below(version) if name not in known)
    free = [name for name in unlisted if name.startswith(f"{_FREE}/")]
    extra = [Damage(name, str(version / name), "is not part of the export") for name in unlisted if name not in free]
    return VerifyReport(
        path=str(version),
        entries=len(manifest.arrays) + len(manifest.files),
        bytes=_total_bytes(manifest),
        damaged=(*stacks, *files, *tensors, *extra),
        unchecked=(
            *(f"{name}: did not exist when the export was written" for name in free),
            *(_other_folder(version, manifest) if not files else ()),
            *(["the rows of the tables: they are in Redis"] if manifest.row_store else ()),
            f"{MANIFEST_PATH}: has no checksum itself",
        ),
    )


def _total_bytes(manifest: Manifest) -> int:
    """Return the number of bytes to read."""
    return sum(array.size for array in manifest.arrays) + sum(entry.size for entry in manifest.files.values())


def _damaged_stacks(version: FilePath, manifest: Manifest, on_read: OnRead) -> Iterator[Damage]:
    faults = dict(size_faults(version, manifest))
    for array in manifest.arrays:
        reason = faults.get(array.file)
        try:
            actual = array.crc32c if reason else file_crc32c(version / array.file, on_read, array.offset, array.size)
        except (OSError, EOFError) as error:
            reason, actual = f"cannot be read: {error}", array.crc32c
        if actual != array.crc32c:
            place = f"bytes [{array.offset}, {array.offset + array.size})"
            reason = f"{place} have CRC32C {actual:#010x}, but the manifest has {array.crc32c:#010x}"
        if reason:
            yield Damage(array.name, str(version / array.file), reason)


def _damaged_files(version: FilePath, manifest: Manifest, on_read: OnRead) -> Iterator[Damage]:
    for name, entry in manifest.files.items():
        path, reason, actual = version / name, "", entry.crc32c
        try:
            if name == GRAPH_FILE.as_posix():
                graph = path.read_bytes()
                on_read(entry.size)
                actual = graph_crc32c(graph, manifest)
                if manifest.layout == "mmap" and len(folders := mapped_folders(graph, manifest)) > 1:
                    reason = f"maps its tables from several folders: {', '.join(map(repr, sorted(folders)))}"
            elif (size := versions([path])[0].size) != entry.size:
                reason = f"has {size} bytes, but the manifest has {entry.size}"
            else:
                actual = file_crc32c(path, on_read)
        except FileNotFoundError:
            reason = "is missing"
        except (OSError, ConfigError) as error:
            reason = f"cannot be read: {error}"
        if not reason and actual != entry.crc32c:
            reason = f"has CRC32C {actual:#010x}, but the manifest has {entry.crc32c:#010x}"
        if reason:
            yield Damage(name, str(path), reason)


def _other_folder(version: FilePath, manifest: Manifest) -> Iterator[str]:
    """Yield a sentence if the graph maps its tables from another folder than `version`: `relocate` may change it, so it
    has no checksum.
    """
    if manifest.layout == "mmap":
        for folder in sorted(mapped_folders((version / GRAPH_FILE).read_bytes(), manifest)):  # none: rows are in Redis
            if not isinstance(version, Path) or folder != str(version.absolute()):
                yield f"{GRAPH_FILE}: the folder that it maps tables from, {folder!r}, has no checksum"


def _damaged_tensors(version: FilePath, manifest: Manifest) -> Iterator[Damage]:
    """Yield stacks for which index and manifest, each intact, differ; and damaged dense tensors."""
    in_bundle = [array for array in manifest.arrays if array.key]  # the others are files of names
    arrays = {array.key for array in in_bundle}
    try:
        with Bundle.open(version / _VARIABLES) as bundle:
            for array in in_bundle:
                entry = bundle.entries.get(array.key)
                parts = entry.parts() if entry else []
                found = [(bundle.data_path(part.shard), part.offset, part.size, part.crc32c) for part in parts]
                wanted = [(version / array.file, array.offset, array.size, array.crc32c)]
                if found != wanted:
                    reason = f"the index has {_shown(found)}, but the manifest has {_shown(wanted)}"
                    yield Damage(array.name, f"{bundle.prefix}.index", reason)
            yield from damaged_parts(bundle, lambda _: None, without=arrays)
    except CheckpointError as error:
        yield Damage("variables", f"{version / _VARIABLES}.index", str(error))


def _shown(parts: Sequence[tuple[object, int, int, int]]) -> str:
    return (
        ", ".join(f"bytes [{o}, {o + size}) of {path} with CRC32C {crc:#010x}" for path, o, size, crc in parts)
        or "none"
    )
