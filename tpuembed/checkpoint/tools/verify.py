"""Whether the bytes of a checkpoint, or of an export, are those that were written: every checksum, in bounded memory."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tpuembed.checkpoint import find_format, open_checkpoint
from tpuembed.checkpoint.bundle.checkpoint import BundleCheckpoint
from tpuembed.checkpoint.keras.archive import member_damage, member_sizes
from tpuembed.checkpoint.keras.weights import open_window
from tpuembed.checkpoint.location import find_bundle
from tpuembed.checkpoint.tools.exports import find_export
from tpuembed.checkpoint.tools.verify_export import total_bytes, verify_export
from tpuembed.checkpoint.types import Checkpoint, TableInfo
from tpuembed.errors import CheckpointError
from tpuembed.files import FilePath, as_path, versions
from tpuembed.manifest import Manifest
from tpuembed.tensor_bundle import Bundle
from tpuembed.tensor_bundle.verification import Damage, damaged_parts, unchecked_keys

__all__ = ["VerifyReport", "verify_files"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_PIECE_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What was found.

    Attributes:
        path: the bundle's prefix, the export's version, or the checkpoint's path.
        entries: how many tensors, or stacks and tables, were looked at.
        bytes: how many were read.
        damaged: what is not as it was written; empty for sound files.
        unchecked: what no checksum is known for, in sentences; their bytes may be wrong unnoticed.
    """

    path: str
    entries: int
    bytes: int
    damaged: tuple[Damage, ...]
    unchecked: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return dataclasses.asdict(self)


def verify_files(
    path: str | FilePath,
    *,
    checkpoint_options: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> VerifyReport:
    """Read everything at `path` through and compare it with its checksums.

    A tensor bundle is checked entry by entry, whatever the entries are; an export file by file, as its manifest lists them,
    and its tensors against the bundle's index too.
    A `.keras` file is checked file by file, as the zip archive that it is.
    Formats that keep no checksums are read through, and the report says that this is all.

    Args:
        path: a checkpoint as `open_checkpoint` takes it; a version of an export, or its MODEL_DIR.
        checkpoint_options: what `open_checkpoint` takes beside the path. Bundles and exports are verified without.
        on_progress: called with (bytes done, bytes in all).

    Raises:
        TpuEmbedError: there is nothing to verify, or the metadata that leads to the bytes is damaged itself.
    """
    counter = _Counter(on_progress)
    export = find_export(path)
    if export:
        return _verify_export(*export, counter)
    prefix = _bundle_of(as_path(path))
    if prefix is not None:
        with Bundle.open(prefix) as bundle:
            return _verify_bundle(bundle, counter)
    with open_checkpoint(path, **(checkpoint_options or {})) as checkpoint:
        if checkpoint.path.endswith(".keras"):
            return _verify_archive(checkpoint.path, counter)
        return _read_through(checkpoint, counter)


def _bundle_of(path: FilePath) -> FilePath | None:
    """The prefix of the bundle that `open_checkpoint` would read tables from, whether or not there are any."""
    try:
        return find_bundle(path) if find_format(path) is BundleCheckpoint else None
    except (OSError, ValueError):  # no permission, a name too long: `open_checkpoint` meets it again, and tells
        return None


class _Counter:
    """Bytes read, told to whoever listens."""

    def __init__(self, on_progress: Progress | None) -> None:
        self._on_progress, self.done, self.total = on_progress, 0, 0

    def __call__(self, count: int) -> None:
        self.done += count
        if self._on_progress:
            self._on_progress(self.done, self.total)


def _verify_bundle(bundle: Bundle, counter: _Counter) -> VerifyReport:
    unchecked = unchecked_keys(bundle)
    parts = [part for key, entry in bundle.entries.items() if key not in unchecked for part in entry.parts()]
    counter.total += sum(part.size for part in parts)
    return VerifyReport(
        path=str(bundle.prefix),
        entries=len(bundle.entries),
        bytes=sum(part.size for part in parts),
        damaged=tuple(damaged_parts(bundle, counter)),
        unchecked=(
            *(f"tensor {key!r}: of dtype variant, whose checksum is not known here" for key in unchecked),
            *_bytes_of_no_tensor(bundle),
        ),
    )


def _bytes_of_no_tensor(bundle: Bundle) -> list[str]:
    """TensorFlow leaves none; whatever lies between tensors has no checksum."""
    held: dict[int, int] = {}
    for entry in bundle.entries.values():
        for part in entry.parts():
            held[part.shard] = held.get(part.shard, 0) + part.size
    paths = {shard: bundle.data_path(shard) for shard in sorted(held)}
    sizes = [version.size for version in versions(list(paths.values()))]
    return [
        f"data file {paths[shard]}: {size - held[shard]} bytes belong to no tensor and have no checksum"
        for shard, size in zip(paths, sizes, strict=True)
        if size != held[shard]
    ]


def _verify_export(version: FilePath, manifest: Manifest, counter: _Counter) -> VerifyReport:
    counter.total = total_bytes(manifest)
    found = verify_export(version, manifest, counter)
    return VerifyReport(
        path=str(version),
        entries=found.entries,
        bytes=found.bytes,
        damaged=found.damaged,
        unchecked=found.unchecked,
    )


def _verify_archive(path: str, counter: _Counter) -> VerifyReport:
    """A `.keras` file: a zip archive has a CRC32 of every file in it."""
    window = open_window(as_path(path))
    try:
        sizes = member_sizes(window)
        counter.total = sum(sizes.values())
        found = ((name, member_damage(window, name, counter)) for name in sizes)
        damaged = tuple(Damage(name, path, reason) for name, reason in found if reason is not None)
    finally:
        window.file.close()
    return VerifyReport(path=path, entries=len(sizes), bytes=counter.done, damaged=damaged)


def _read_through(checkpoint: Checkpoint, counter: _Counter) -> VerifyReport:
    """Where there are no checksums: whether every row can be read at all."""
    tables = checkpoint.tables()
    counter.total = sum(_table_bytes(info) * (1 + len(info.slots)) for info in tables.values())
    damaged = []
    for info in tables.values():
        for slot in (None, *info.slots):
            try:
                _read_table(checkpoint, info, slot, counter)
            except CheckpointError as error:
                damaged.append(
                    Damage(info.name if slot is None else f"{info.name}/{slot}", checkpoint.path, str(error))
                )
    return VerifyReport(
        path=checkpoint.path,
        entries=sum(1 + len(info.slots) for info in tables.values()),
        bytes=counter.done,
        damaged=tuple(damaged),
        unchecked=(
            f"format {checkpoint.format} keeps no checksums of rows: they were read, and may be wrong unnoticed",
        ),
    )


def _table_bytes(info: TableInfo) -> int:
    return info.rows * info.dim * info.dtype.itemsize


def _read_table(checkpoint: Checkpoint, info: TableInfo, slot: str | None, counter: _Counter) -> None:
    step = max(1, _PIECE_BYTES // max(1, info.dim * info.dtype.itemsize))
    buffer = np.empty((min(step, info.rows), info.dim), info.dtype)
    for start in range(0, info.rows, step):
        piece = buffer[: info.rows - start]
        checkpoint.read_into(info.name, start, piece, slot)
        counter(piece.nbytes)
