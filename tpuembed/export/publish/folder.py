"""The folder an export is written in, and the one rename that publishes it.

A version is written under `MODEL_DIR/.staging-<version>-<token>`, which no server looks at: `version/` there is what will be
published, `tables/` has the streamed rows and the record of those that are finished. When every byte of `version/` is on the
disk, it is renamed to `MODEL_DIR/<version>`. Two locks keep exporters apart (flock, so the kernel releases them however a
process ends): one on MODEL_DIR, held for moments while folders appear or are renamed; one on the staging folder, held as
long as its exporter lives. A staging folder that nobody holds is resumed, kept or removed: see `unfinished`. Where the file
system knows no such locks (NFS, for folders), nothing is resumed, litter stays, and a rename still never replaces a version:
a version is not empty.
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
from tpuembed.export.publish.unfinished import PREFIX, TABLES, VERSION, Sorted, Unfinished, sort_out
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
"""Errors that say that what was streamed is worth nothing."""
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
MAX_VERSION = 2**63 - 1
"""The last int64: TensorFlow Serving does not see a folder of a higher number."""
# What absl::SimpleAtoi takes for a number: TensorFlow Serving reads version folders with it.
_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*", re.ASCII)


def next_version(model_dir: Path) -> int:
    """The highest version in `model_dir` plus one, 1 where there is none; "007" is 7, as for TensorFlow Serving.

    Raises:
        ExportError: no server would see that one.
    """
    highest = max(_versions(model_dir), default=0)
    if highest == MAX_VERSION:
        raise ExportError(
            f"MODEL_DIR {model_dir}: version {highest} exists, after which there is none; name a lower version that is free"
        )
    return highest + 1


def check_free(model_dir: Path, version: int | None) -> None:
    """Raise ExportError where `version` exists in `model_dir`, which need not; None is free where there is a next one.

    Raises:
        ConfigError: it is no positive integer that a server can read.
    """
    check_version(version)
    if version is None and model_dir.is_dir():
        next_version(model_dir)
    if model_dir.is_dir() and version in _versions(model_dir):
        raise ExportError(
            f"MODEL_DIR {model_dir}: version {version} exists; choose another one, {next_version(model_dir)} is free"
        )


def ensure_space(model_dir: Path, size: int, header: Header | None = None, *, restart: bool = False) -> None:
    """Raise ExportError unless `size` bytes fit on the disk of `model_dir`, which need not exist yet.

    What the export of `header` has written there before, and what it will remove, counts as free.
    """
    place = next(path for path in (model_dir, *model_dir.absolute().parents) if path.exists())
    found = _peek(model_dir, header, restart=restart)
    reused = [] if found.resumable is None else [found.resumable]
    free = shutil.disk_usage(place).free + sum(unfinished.bytes for unfinished in (*reused, *found.litter))
    if free < size:
        kept = "".join(f"; an unfinished export holds {unfinished}" for unfinished in found.kept)
        raise ExportError(
            f"MODEL_DIR {model_dir}: the export needs {format_bytes(size)} ({size} bytes) and its disk has "
            f"{format_bytes(free)} ({free} bytes) free; free space or export fewer tables{kept}"
        )


def _peek(model_dir: Path, header: Header | None, *, restart: bool) -> Sorted:
    """What an export into `model_dir` would find, as it is now."""
    if not model_dir.is_dir():
        return sort_out((), header)
    with _failing(model_dir), _locked(model_dir):
        held = dict(_abandoned(model_dir))
        for lock in held.values():
            os.close(lock)
    return sort_out([Unfinished(folder) for folder in held], header, restart=restart)


def sync_tree(root: Path) -> None:
    """Flush every file and folder under `root`, itself included, to the disk."""
    for folder, _, files in os.walk(root):
        for name in files:
            flush(Path(folder, name))
        flush(Path(folder))


class Staging:
    """A version in the making: a context that commits once, or leaves nothing behind but what can be resumed.

    Attributes:
        path: of the version in the making; empty at the start.
        tables: where rows are streamed to, on the same file system; it may hold what an earlier export finished.
        kept: staging folders of other requests, unfinished, that could still be resumed.
    """

    def __init__(
        self, model_dir: Path, version: int | None = None, header: Header | None = None, *, restart: bool = False
    ) -> None:
        """Take over the staging folder that `header` can resume in `model_dir`, itself made where missing, or make one.

        Args:
            model_dir: where versions lie.
            version: the one to commit; None takes the next free integer at the moment of the commit.
            header: of what is exported; None where no other export can ever go on with it.
            restart: remove what `header` could resume.

        Raises:
            ConfigError: the version is no positive integer that a server can read.
            ExportError: the version exists, or MODEL_DIR cannot be written.
        """
        check_free(model_dir, version)
        self.model_dir, self.version, self._can_go_on = model_dir, version, header is not None
        with _failing(model_dir):
            model_dir.mkdir(parents=True, exist_ok=True)
            with _locked(model_dir):
                check_free(self.model_dir, self.version)
                held = dict(_abandoned(model_dir))
                found = sort_out([Unfinished(folder) for folder in held], header, restart=restart)
                self.folder = self._make() if found.resumable is None else found.resumable.folder
                self._lock = held.pop(self.folder) if self.folder in held else _lock(self.folder)
        self.kept: Sequence[Unfinished] = found.kept
        for unfinished in found.litter:
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
        """Remove the folder, unless an error ended it and the next export can go on with it."""
        if error is None or not self.is_kept_after(error):
            shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def is_kept_after(self, error: BaseException) -> bool:
        """Whether the next export can go on with what there is."""
        return self._can_go_on and not isinstance(error, _SPOILING) and self.finished > 0

    def open_tables(self, plan: ExportPlan) -> FolderTables:  # noqa: ARG002 - as Stage
        """Where the tables of `plan` are streamed to."""
        return FolderTables(self.tables)

    @property
    def finished(self) -> int:
        """Shards that a next export need not stream again."""
        record = read_record(self.tables)
        return len(record.finished) if record else 0

    def commit(self, settle: Callable[[str], None] = lambda _: None) -> Path:
        """Flush the folder to the disk and rename it to its version; the path of the version.

        Args:
            settle: called with the version's name before every try to take it, while no other exporter may; what it
                writes, it flushes.

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
                    raise  # else it was taken a moment ago, by an exporter that no lock keeps apart


def check_version(version: int | None) -> None:
    """Raise ConfigError unless it is None, or a positive integer that a server can read."""
    if version is not None:
        check_count("version", version)
        if version > MAX_VERSION:
            raise ConfigError(f"version must be at most {MAX_VERSION}, got {version}")


def _versions(model_dir: Path) -> set[int]:
    return versions_among(path.name for path in model_dir.iterdir())


def versions_among(names: Iterable[str]) -> set[int]:
    """The numbers that TensorFlow Serving takes these names of folders for, where it does."""
    numbers = {int(name) for name in names if _INTEGER.fullmatch(name)}
    return {number for number in numbers if number <= MAX_VERSION}


def _abandoned(model_dir: Path) -> Iterator[tuple[Path, int]]:
    """Staging folders whose exporter is gone, with the lock that now keeps others off them."""
    for folder in model_dir.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # held, or gone in the meantime
            yield folder, _lock(folder, fcntl.LOCK_NB)


def _lock(folder: Path, flags: int = 0) -> int:
    """A descriptor that holds the exclusive lock of `folder` until it is closed.

    Where there are no locks, waiting for one holds nothing, and trying for one (LOCK_NB) fails.
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
    """Turn an OSError into one that names MODEL_DIR."""
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        raise ExportError(f"MODEL_DIR {model_dir}: it, or a folder above it, is a file; name a directory") from None
    except OSError as error:
        raise ExportError(
            f"MODEL_DIR {model_dir}: cannot be written: {error.strerror}; name a directory that you may write to"
        ) from None
