"""Writes versions into a folder: a staging folder, and the one rename that publishes it.

A version is written under `MODEL_DIR/.staging-<version>-<token>`, which servers ignore. `version/` in it will be
published. `tables/` has the streamed rows and the record of the finished ones. When every byte of `version/` is on the
disk, it is renamed to `MODEL_DIR/<version>`.

Two flock locks keep exporters apart; the kernel releases them when a process ends. The lock on MODEL_DIR is held
briefly, while folders are created or renamed. The lock on the staging folder is held as long as its exporter runs. A
staging folder without an exporter is resumed, kept or removed: see `reserve`.

A version whose files are being linked has a shared lock, so that no prune removes it. It is taken under the lock of MODEL_DIR.

Some file systems (such as NFS) have no such locks for folders. There, nothing is resumed and stale folders stay. A
rename still never replaces a version, because a version is not empty.
"""

import contextlib
import dataclasses
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Self

from tpuembed.errors import ExportError
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan.plan import ExportPlan, ShardTask, format_bytes
from tpuembed.export.publish.layouts import Layout, choose_layout
from tpuembed.export.publish.version_writer import (
    MAX_VERSION,
    PREFIX,
    VersionWriter,
    check_version,
    naming_model_dir,
    versions_among,
)
from tpuembed.export.stream.resume_log import Header, Record, Recorder, read_record, start_record
from tpuembed.export.stream.shard import Batch, ShardResult, Source, Target
from tpuembed.files import FilePath, flush

__all__ = [
    "FolderWriter",
    "abandoned",
    "check_free",
    "link_or_copy",
    "lock_folder",
    "locked",
    "next_version",
    "publish_folder",
    "temporary_staging",
]

_TABLES: Final = "tables"
_VERSION: Final = "version"
_MAX_AGE_SECONDS: Final = 7 * 86400
"""An unfinished export is stale if nothing was added to it for this time."""
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FolderWriter(VersionWriter):
    """Writes a version into a folder of this machine.

    Attributes:
        folder: the staging folder. `path` and `tables` are in it, on the file system of MODEL_DIR.
    """

    model_dir: Path

    def __init__(self, model_dir: Path, plan: ExportPlan, options: ExportOptions, source: Source) -> None:
        super().__init__(model_dir, plan, options, source)
        self._locks: list[int] = []

    def check(self) -> None:
        """See VersionWriter.check."""
        model_dir, size = self.model_dir, self.plan.table_bytes
        check_free(model_dir, self.options.version)
        # An unfinished export may have some of the bytes, or is removed. Then the reservation of the files' blocks finds out.
        if model_dir.is_dir() and any(model_dir.glob(f"{PREFIX}*")):
            return
        there = next(path for path in (model_dir, *model_dir.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free
        if free < size:
            raise ExportError(
                f"MODEL_DIR {model_dir}: the export needs {format_bytes(size)} ({size} bytes), but its disk has "
                f"{format_bytes(free)} ({free} bytes) free. Free space, or export fewer tables."
            )

    @property
    def layout(self) -> Layout:
        """See VersionWriter.layout."""
        return choose_layout(self.options.layout, self.model_dir, self.options.serving_root)

    def reserve(self) -> None:
        """Take over the staging folder that the same export left, or create one. MODEL_DIR is created if it is missing."""
        model_dir, version = self.model_dir, self.options.version
        check_free(model_dir, version)
        with naming_model_dir(model_dir):
            model_dir.mkdir(parents=True, exist_ok=True)
            with locked(model_dir):
                check_free(model_dir, version)
                held = dict(abandoned(model_dir))
                mine, stale, kept = list[_Unfinished](), list[_Unfinished](), list[_Unfinished]()
                for one in map(_Unfinished.of, held):
                    its = mine if one.is_resumable(self.header) else stale if one.is_stale(self.header) else kept
                    its.append(one)
                mine.sort(key=lambda one: len(one.record.finished) if one.record else 0)
                if mine and self.options.resume:
                    self.folder = mine.pop().folder  # with most finished shards; the others are of no use
                else:
                    self.folder = model_dir / f"{PREFIX}{version or next_version(model_dir)}-{secrets.token_hex(4)}"
                    self.folder.mkdir()
                self._locks = [held.pop(self.folder) if self.folder in held else lock_folder(self.folder)]
        self.kept = tuple(map(str, kept))  # another export may have hours of work in them
        for one in mine + stale:
            shutil.rmtree(one.folder, ignore_errors=True)
        for lock in held.values():
            os.close(lock)
        self.path, self.tables = self.folder / _VERSION, self.folder / _TABLES
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()

    def open(self) -> Sequence[ShardTask]:
        """Return all shards, each with its recorded checksum if the record has one.

        The files and the record of an earlier run of the same export are taken over. Otherwise new ones are created.
        """
        found = read_record(self.tables)
        files = {self.tables / stack.file: stack.size for stack in self.plan.stacks}
        is_whole = all(path.is_file() and path.stat().st_size == size for path, size in files.items())
        if found is None or found.header != self.header or not is_whole:
            shutil.rmtree(self.tables, ignore_errors=True)
            self.tables.mkdir()
            found = None
        for path, size in files.items():
            with open(path, "ab") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, size)  # so that a full disk is noticed now
                except (AttributeError, OSError) as error:
                    if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                        raise ExportError(
                            f"data file {path}: {size} bytes cannot be reserved: {error.strerror}. Free space, or export "
                            "fewer tables."
                        ) from None
                    file.truncate(size)
        self._record = found or start_record(self.tables, self.header)
        recorded = self._record.finished
        return [
            dataclasses.replace(task, written_crc32c=recorded[task.index].crc32c)
            if task.index in recorded and recorded[task.index].fulfils(task)
            else task
            for task in self.plan.shards
        ]

    def batches(self, tasks: Sequence[ShardTask]) -> list[Batch]:
        """See VersionWriter.batches. A batch is one shard."""
        return [Batch((task,)) for task in tasks]

    def target(self, batch: Batch) -> Target:  # noqa: ARG002 - all batches have one
        """See VersionWriter.target."""
        return Target(kind="folder", place=str(self.tables))

    @contextlib.contextmanager
    def recording(self) -> Iterator[Callable[[ShardResult], None]]:
        """See VersionWriter.recording."""
        with Recorder(self.tables, self._record) as recorder:
            yield lambda result: recorder.add(self.plan.shards[result.index].file, result)

    def results(self, streamed: Sequence[ShardResult]) -> Sequence[ShardResult]:
        """Return the results. Those of reused shards get the fields that only the process that wrote them could know."""
        recorded = self._record.finished
        return [
            dataclasses.replace(recorded[result.index], peak_rss_bytes=result.peak_rss_bytes, is_reused=True)
            if result.is_reused
            else result
            for result in streamed
        ]

    @property
    def finished(self) -> int:
        """See VersionWriter.finished."""
        record = read_record(self.tables)
        return len(record.finished) if record else 0

    def publish(self, settle: Callable[[str], None] = lambda _: None) -> FilePath:
        """Flush the version to the disk, rename it to its number, and return its path.

        Args:
            settle: called with the version's name before every attempt to publish it, under the lock of MODEL_DIR. It
                flushes what it writes.

        Raises:
            ExportError: another export published that version first, or MODEL_DIR cannot be written.
        """
        return publish_folder(self.path, self.model_dir, self.options.version, settle)

    def abandon(self, *, keep: bool) -> None:
        """See VersionWriter.abandon."""
        shutil.rmtree(self.path if keep else self.folder, ignore_errors=True)
        for lock in self._locks:
            os.close(lock)


def publish_folder(path: Path, model_dir: Path, version: int | None, settle: Callable[[str], None]) -> Path:
    """Flush the folder `path`, rename it to `version` or the next free one, and return its new path.

    Args:
        settle: see FolderWriter.publish.

    Raises:
        ExportError: that version exists, or MODEL_DIR cannot be written.
    """
    with naming_model_dir(model_dir):
        for folder, _, files in os.walk(path):
            for name in (*files, ""):  # "" is the folder itself
                flush(Path(folder, name))
        with locked(model_dir):
            while True:
                check_free(model_dir, version)
                target = model_dir / str(version or next_version(model_dir))
                settle(target.name)
                try:
                    path.rename(target)
                    break
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise  # otherwise another exporter, without locks, has just taken this version: try the next one
            flush(model_dir)
    return target


def next_version(model_dir: Path) -> int:
    """Return the highest version in `model_dir` plus one, or 1 if there is none. "007" is 7, as in TensorFlow Serving.

    Raises:
        ExportError: there is no higher number that a server would load.
    """
    highest = max(_versions(model_dir), default=0)
    if highest == MAX_VERSION:
        raise ExportError(
            f"MODEL_DIR {model_dir}: version {highest} exists, and no higher number is possible. Name a lower "
            "version that is free."
        )
    return highest + 1


def check_free(model_dir: Path, version: int | None) -> None:
    """Raise ExportError if `version` exists in `model_dir`. The folder may be missing. None needs a next free version.

    Raises:
        ConfigError: the version is not a positive integer that a server can read.
    """
    check_version(version)
    if version is None and model_dir.is_dir():
        next_version(model_dir)
    if model_dir.is_dir() and version in _versions(model_dir):
        raise ExportError(
            f"MODEL_DIR {model_dir}: version {version} exists. Choose another one, such as {next_version(model_dir)}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Unfinished:
    """An export that was killed or failed.

    Attributes:
        folder: its staging folder.
        record: of its finished shards; None if it cannot be read.
        is_published: its version is complete; it was killed between the commit and the end.
    """

    folder: Path
    record: Record | None
    is_published: bool

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Return what is in a staging folder."""
        links = (file.stat().st_nlink for file in (folder / _TABLES).glob("*.data"))
        is_published = not (folder / _VERSION).is_dir() and any(count > 1 for count in links)
        return cls(folder=folder, record=read_record(folder / _TABLES), is_published=is_published)

    def is_resumable(self, header: Header) -> bool:
        """Returns True if the export of `header` may resume it."""
        return self.record is not None and self.record.header == header and header.lasts and not self.is_published

    def is_stale(self, header: Header) -> bool:
        """Returns True if no later run can resume it, as far as the export of `header` can tell."""
        if self.record is None or self.is_published or time.time() - self.record.written > _MAX_AGE_SECONDS:
            return True
        its = self.record.header
        return not its.lasts or (its.source == header.source and its.fingerprint != header.fingerprint)

    def __str__(self) -> str:
        """Return the name of it in messages."""
        if self.record is None:
            return str(self.folder)
        done = format_bytes(sum(result.bytes for result in self.record.finished.values()))
        header = self.record.header
        return f"{self.folder} ({done} of {format_bytes(header.table_bytes)}, from {header.source})"


def _versions(model_dir: Path) -> set[int]:
    return versions_among(path.name for path in model_dir.iterdir())


def abandoned(model_dir: Path, kind: str = "[0-9]") -> Iterator[tuple[Path, int]]:
    """Yield staging folders that no process writes, each with a descriptor that now holds its lock.

    Their names go on with `kind` after the prefix: those of exports with a version.
    """
    for folder in model_dir.glob(f"{PREFIX}{kind}*"):
        with contextlib.suppress(OSError):  # locked by its exporter, or removed in the meantime
            yield folder, lock_folder(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def temporary_staging(folder: Path, kind: str, name: str) -> Iterator[Path]:
    """Yield a new staging folder in `folder` that no other process removes. It is removed at the end.

    Those of this `kind` whose processes were killed are removed now.
    """
    with locked(folder):
        left = dict(abandoned(folder, f"{kind}-"))
        staging = folder / f"{PREFIX}{kind}-{name}-{secrets.token_hex(4)}"
        staging.mkdir()
        lock = lock_folder(staging)
    try:
        for path, its_lock in left.items():
            shutil.rmtree(path, ignore_errors=True)
            os.close(its_lock)
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


def lock_folder(folder: Path, operation: int = fcntl.LOCK_EX) -> int:
    """Return a descriptor that holds a lock of `folder` until it is closed: an operation of `fcntl.flock`.

    On a file system without locks, a blocking call holds no lock, and a non-blocking one (LOCK_NB) fails.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if operation & fcntl.LOCK_NB or error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise
    return descriptor


@contextlib.contextmanager
def locked(folder: Path, operation: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a lock of `folder` in a context: see lock_folder."""
    descriptor = lock_folder(folder, operation)
    try:
        yield
    finally:
        os.close(descriptor)


def link_or_copy(source: str | Path, target: Path) -> None:
    """Make a hard link, or a copy where there can be none: on another file system, or with too many links of the file."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
