"""Verifies every checksum of a checkpoint or export, in bounded memory."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tpuembed.checkpoint import find_format, open_checkpoint
from tpuembed.checkpoint.bundle.checkpoint import BundleCheckpoint
from tpuembed.checkpoint.keras.archive import member_damage, member_sizes
from tpuembed.checkpoint.keras.weights import open_window
from tpuembed.checkpoint.location import find_bundle
from tpuembed.checkpoint.tools.exports import find_export
from tpuembed.checkpoint.tools.verify_export import VerifyReport, total_bytes, verify_export
from tpuembed.checkpoint.types import Checkpoint, TableInfo
from tpuembed.errors import CheckpointCorruptError, CheckpointError
from tpuembed.files import FilePath, as_path, versions
from tpuembed.tensor_bundle import Bundle
from tpuembed.tensor_bundle.verification import Damage, damaged_parts, unchecked_keys

__all__ = ["VerifyReport", "verify_files"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""

_PIECE_BYTES = 16 << 20


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
        counter.total = total_bytes(export[1])
        return verify_export(*export, counter)
    prefix = _bundle_of(as_path(path))
    if prefix is not None:
        with Bundle.open(prefix) as bundle:
            return _verify_bundle(bundle, counter)
    with open_checkpoint(path, **(checkpoint_options or {})) as checkpoint:
        if checkpoint.path.endswith(".keras"):
            report = _verify_archive(checkpoint.path, counter)
        else:
            report = _read_through(checkpoint, counter)
        return dataclasses.replace(report, damaged=(*report.damaged, *_damaged_vocabularies(checkpoint)))


def _bundle_of(path: FilePath) -> FilePath | None:
    """Return the prefix of the bundle that `open_checkpoint` would read, even if it has no tables."""
    try:
        return find_bundle(path) if find_format(path) is BundleCheckpoint else None
    except (OSError, ValueError):  # no permission, or a name too long: `open_checkpoint` raises the same error
        return None


class _Counter:
    """Counts the bytes read, and reports progress."""

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
            *(f"tensor {key!r}: has dtype variant, whose checksum is not supported" for key in unchecked),
            *_bytes_of_no_tensor(bundle),
        ),
    )


def _damaged_vocabularies(checkpoint: Checkpoint) -> Iterator[Damage]:
    for table in checkpoint.tables():
        try:
            checkpoint.vocabulary(table)
        except CheckpointCorruptError as error:
            yield Damage(f"vocabulary of table {table!r}", checkpoint.path, str(error))


def _bytes_of_no_tensor(bundle: Bundle) -> list[str]:
    """Return sentences about bytes between tensors, which have no checksum. TensorFlow leaves no such bytes."""
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


def _verify_archive(path: str, counter: _Counter) -> VerifyReport:
    """Verify a `.keras` file: a zip archive has a CRC32 of every file in it."""
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
    """Read every row of a format without checksums."""
    tables = checkpoint.tables()
    counter.total = sum(info.rows * _row_bytes(info) * (1 + len(info.slots)) for info in tables.values())
    damaged = []
    for info in tables.values():
        for slot in (None, *info.slots):
            try:
                _read_table(checkpoint, info, slot, counter)
            except CheckpointError as error:
                name = info.name if slot is None else f"{info.name}/{slot}"
                damaged.append(Damage(name, checkpoint.path, str(error)))
    unchecked = (
        f"format {checkpoint.format} has no checksums of rows: they were read, but damage to them is not noticed"
    )
    return VerifyReport(
        path=checkpoint.path,
        entries=sum(1 + len(info.slots) for info in tables.values()),
        bytes=counter.done,
        damaged=tuple(damaged),
        unchecked=(unchecked,),
    )


def _row_bytes(info: TableInfo) -> int:
    return info.dim * info.dtype.itemsize


def _read_table(checkpoint: Checkpoint, info: TableInfo, slot: str | None, counter: _Counter) -> None:
    step = max(1, _PIECE_BYTES // max(1, _row_bytes(info)))
    buffer = np.empty((min(step, info.rows), info.dim), info.dtype)
    for start in range(0, info.rows, step):
        piece = buffer[: info.rows - start]
        checkpoint.read_into(info.name, start, piece, slot)
        counter(piece.nbytes)
