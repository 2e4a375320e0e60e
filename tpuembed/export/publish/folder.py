"""The staging folder that an export is written in, and the one rename that publishes it.

A version is written under `MODEL_DIR/.staging-<version>-<token>`, which servers ignore. `version/` in it will be
published. `tables/` has the streamed rows and the record of the finished ones. When every byte of `version/` is on the
disk, it is renamed to `MODEL_DIR/<version>`.

Two flock locks keep exporters apart; the kernel releases them when a process ends. The lock on MODEL_DIR is held
briefly, while folders are created or renamed. The lock on the staging folder is held as long as its exporter runs. A
staging folder without an exporter is resumed, kept or removed: see `unfinished`.

Some file systems (such as NFS) have no such locks for folders. There, nothing is resumed and stale folders stay. A
rename still never replaces a version, because a version is not empty.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from tpuembed.config.checks import check_count
from tpuembed.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError, ExportError
from tpuembed.export.formatting import format_bytes
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.publish.tables import FolderTables
from tpuembed.export.publish.unfinished import PREFIX, TABLES, VERSION, StagingFolders, Unfinished, classify_staging
from tpuembed.export.stream.resume_log import Header, flush, read_record

__all__ = [
    "MAX_VERSION",
    "Staging",
    "check_free",
    "check_version",
    "ensure_space",
    "next_version",
    "sync_tree",
    "versions_among",
]

_SPOILING = (CheckpointCorruptError, CheckpointMismatchError)
"""Errors after which the streamed data is useless."""
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
MAX_VERSION = 2**63 - 1
"""The last int64: TensorFlow Serving ignores a folder with a higher number."""
# The number syntax of absl::SimpleAtoi, which TensorFlow Serving uses to read version folders.
_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*", re.ASCII)


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


def ensure_space(model_dir: Path, size: int, header: Header | None = None, *, restart: bool = False) -> None:
    """Raise ExportError unless `size` bytes fit on the disk of `model_dir`, which may not exist yet.

    Data that the export of `header` can reuse, and stale data that it will remove, count as free.
    """
    place = next(path for path in (model_dir, *model_dir.absolute().parents) if path.exists())
    found = _peek(model_dir, header, restart=restart)
    reused = [] if found.resumable is None else [found.resumable]
    free = shutil.disk_usage(place).free + sum(unfinished.bytes for unfinished in (*reused, *found.stale))
    if free < size:
        kept = "".join(f" An unfinished export uses {unfinished}." for unfinished in found.kept)
        raise ExportError(
            f"MODEL_DIR {model_dir}: the export needs {format_bytes(size)} ({size} bytes), but its disk has "
            f"{format_bytes(free)} ({free} bytes) free. Free space, or export fewer tables.{kept}"
        )


def _peek(model_dir: Path, header: Header | None, *, restart: bool) -> StagingFolders:
    """Return the staging folders that an export into `model_dir` would find now."""
    if not model_dir.is_dir():
        return classify_staging((), header)
    with _failing(model_dir), _locked(model_dir):
        held = dict(_abandoned(model_dir))
        for lock in held.values():
            os.close(lock)
    return classify_staging([Unfinished(folder) for folder in held], header, restart=restart)


def sync_tree(root: Path) -> None:
    """Flush every file and folder under `root`, and `root` itself, to the disk."""
    for folder, _, files in os.walk(root):
        for name in files:
            flush(Path(folder, name))
        flush(Path(folder))


class Staging:
    """A version being written. A context that commits once, or else leaves only what can be resumed.

    Attributes:
        path: local path of the version being written; empty at the start.
        tables: the folder to stream rows to, on the same file system; it may hold rows that an earlier run finished.
        kept: unfinished staging folders of other requests that could still be resumed.
    """

    def __init__(
        self, model_dir: Path, version: int | None = None, header: Header | None = None, *, restart: bool = False
    ) -> None:
        """Take over the staging folder that `header` can resume in `model_dir`, or create one.

        Args:
            model_dir: the folder of the versions; created if it is missing.
            version: the version to commit; None for the next free integer at the moment of the commit.
            header: identifies the export; None if no other run can ever resume it.
            restart: remove what `header` could resume.

        Raises:
            ConfigError: the version is not a positive integer that a server can read.
            ExportError: the version exists, or MODEL_DIR cannot be written.
        """
        check_free(model_dir, version)
        self.model_dir, self.version, self._can_go_on = model_dir, version, header is not None
        with _failing(model_dir):
            model_dir.mkdir(parents=True, exist_ok=True)
            with _locked(model_dir):
                check_free(self.model_dir, self.version)
                held = dict(_abandoned(model_dir))
                found = classify_staging([Unfinished(folder) for folder in held], header, restart=restart)
                self.folder = self._make() if found.resumable is None else found.resumable.folder
                self._lock = held.pop(self.folder) if self.folder in held else _lock(self.folder)
        self.kept: Sequence[Unfinished] = found.kept
        for unfinished in found.stale:
            shutil.rmtree(unfinished.folder, ignore_errors=True)
        for lock in held.values():
            os.close(lock)
        self.path, self.tables = self.folder / VERSION, self.folder / TABLES
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()

    def _make(self) -> Path:
        folder = self.model_dir / f"{PREFIX}{self.version or next_version(self.model_dir)}-{secrets.token_hex(4)}"
        folder.mkdir()
        return folder

    def __enter__(self) -> "Staging":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the folder, unless an error occurred after which the next export can resume it."""
        if error is None or not self.is_kept_after(error):
            shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def is_kept_after(self, error: BaseException) -> bool:
        """Returns True if the next export can resume this one after `error`."""
        return self._can_go_on and not isinstance(error, _SPOILING) and self.finished > 0

    def open_tables(self, plan: ExportPlan) -> FolderTables:  # noqa: ARG002 - as StagedVersion
        """Return the place to stream the tables of `plan` to."""
        return FolderTables(self.tables)

    @property
    def finished(self) -> int:
        """Return the number of shards that a resumed export would reuse."""
        record = read_record(self.tables)
        return len(record.finished) if record else 0

    def commit(self, settle: Callable[[str], None] = lambda _: None) -> Path:
        """Flush the folder to the disk, rename it to its version, and return the version's path.

        Args:
            settle: called with the version's name before every attempt to publish it, under the lock of MODEL_DIR. It
                flushes what it writes.

        Raises:
            ExportError: another export committed that version first, or MODEL_DIR cannot be written.
        """
        with _failing(self.model_dir):
            sync_tree(self.path)
            with _locked(self.model_dir):
                target = self._publish(settle)
                flush(self.model_dir)
        return target

    def _publish(self, settle: Callable[[str], None]) -> Path:
        while True:
            check_free(self.model_dir, self.version)
            target = self.model_dir / str(self.version or next_version(self.model_dir))
            settle(target.name)
            try:
                return self.path.rename(target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise  # otherwise another exporter, without locks, has just taken this version: try the next one


def check_version(version: int | None) -> None:
    """Raise ConfigError unless `version` is None or a positive integer that a server can read."""
    if version is not None:
        check_count("version", version)
        if version > MAX_VERSION:
            raise ConfigError(f"version must be at most {MAX_VERSION}, got {version}.")


def _versions(model_dir: Path) -> set[int]:
    return versions_among(path.name for path in model_dir.iterdir())


def versions_among(names: Iterable[str]) -> set[int]:
    """Return the version numbers that TensorFlow Serving reads from these names of folders."""
    numbers = {int(name) for name in names if _INTEGER.fullmatch(name)}
    return {number for number in numbers if number <= MAX_VERSION}


def _abandoned(model_dir: Path) -> Iterator[tuple[Path, int]]:
    """Yield staging folders without an exporter, each with a descriptor that now holds its lock."""
    for folder in model_dir.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # locked by its exporter, or removed in the meantime
            yield folder, _lock(folder, fcntl.LOCK_NB)


def _lock(folder: Path, flags: int = 0) -> int:
    """Return a descriptor that holds the exclusive lock of `folder` until it is closed.

    On a file system without locks, a blocking call holds no lock, and a non-blocking one (LOCK_NB) fails.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except OSError as error:
        if flags or error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise
    return descriptor


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = _lock(folder)
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _failing(model_dir: Path) -> Iterator[None]:
    """Turn an OSError into an ExportError that names MODEL_DIR."""
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        raise ExportError(f"MODEL_DIR {model_dir}: it, or a folder above it, is a file. Name a directory.") from None
    except OSError as error:
        raise ExportError(
            f"MODEL_DIR {model_dir}: cannot be written: {error.strerror}. Name a directory that you may write to."
        ) from None
