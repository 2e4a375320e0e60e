"""`VersionWriter`, which writes one version of an export, and what its two implementations share.

`folder` writes to a disk, and `store` to an object store. `tpuembed.export.run` chooses one and is the only caller.
"""

import abc
import contextlib
import errno
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Self

from tpuembed.config.checks import check_count
from tpuembed.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError, ExportError, TpuEmbedError
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan.plan import ExportPlan, ShardTask
from tpuembed.export.publish.layouts import Layout
from tpuembed.export.stream.resume_log import Header
from tpuembed.export.stream.shard import Batch, ShardResult, Source, Target, ignore
from tpuembed.files import FilePath, MissingBucketError

__all__ = [
    "MAX_VERSION",
    "PREFIX",
    "VersionWriter",
    "check_version",
    "naming_model_dir",
    "versions_among",
]

MAX_VERSION: Final = 2**63 - 1
"""The last int64: TensorFlow Serving ignores a folder with a higher number."""
PREFIX: Final = ".staging-"
"""Names of versions being written begin so. Servers ignore them."""
_SPOILING: Final = (CheckpointCorruptError, CheckpointMismatchError)
"""Errors after which the streamed data is useless."""
# The number syntax of absl::SimpleAtoi, which TensorFlow Serving uses to read version folders.
_INTEGER: Final = re.compile(r"\s*[+-]?[0-9]+\s*", re.ASCII)


class VersionWriter(abc.ABC):
    """Writes one version. A context that publishes once, or else leaves only what the same export can resume.

    The order of the calls: `check`; then, as a context, the graph is saved into `path`; `open`, and `recording` around
    the engine's `batches` and `target`, then `results`; `publish`.

    Attributes:
        model_dir: the folder of the versions.
        plan, options: of the export.
        header: identifies the export.
        path: inside the context: local path of the version being written; empty at the start.
        tables: inside the context: local folder with a file of full size for every stack, named StackPlan.file. A file
            has the stack's bytes, or is sparse if they are in a store.
        kept: inside the context: the unfinished exports of other requests, as messages name them.
    """

    path: Path
    tables: Path
    kept: Sequence[str] = ()

    def __init__(self, model_dir: FilePath, plan: ExportPlan, options: ExportOptions, source: Source) -> None:
        """Write nothing yet. The tables of `plan` will be read from `source`."""
        self.model_dir, self.plan, self.options = model_dir, plan, options
        self.header = Header.of(plan, source)

    @abc.abstractmethod
    def check(self) -> None:
        """Raise an error if the version exists, or can never be written here. Writes nothing.

        Raises:
            ConfigError: an option does not fit MODEL_DIR.
            ExportError: the version exists, or its tables have no room.
        """

    @property
    @abc.abstractmethod
    def layout(self) -> Layout:
        """Return the layout that the options name, for versions served from here."""

    @abc.abstractmethod
    def reserve(self) -> None:
        """Take over what the same export left, or begin a version. Sets `path`, `tables` and `kept`.

        Raises:
            ExportError: the version exists, or MODEL_DIR cannot be written.
        """

    @abc.abstractmethod
    def open(self) -> Sequence[ShardTask]:
        """Create the data files, or open those of an interrupted run. Return all shards.

        A shard that may be finished has the checksum that was recorded. Call it once the graph is saved.
        """

    @abc.abstractmethod
    def batches(self, tasks: Sequence[ShardTask]) -> list[Batch]:
        """Group `tasks` into batches for workers, in their order."""

    @abc.abstractmethod
    def target(self, batch: Batch) -> Target:
        """Return the target of a batch for its worker. Call it when the batch is assigned, because signed URLs expire."""

    def recording(self) -> contextlib.AbstractContextManager[Callable[[ShardResult], None]]:
        """Return a context with a function that records a finished shard. At its end, the record is durable.

        The function raises ExportError if results cannot be recorded any more.
        """
        return contextlib.nullcontext(ignore)

    @abc.abstractmethod
    def results(self, streamed: Sequence[ShardResult]) -> Sequence[ShardResult]:
        """Return what the engine returned, completed by what earlier runs recorded."""

    @property
    def finished(self) -> int:
        """Return the number of shards that a resumed export would reuse."""
        return 0

    @abc.abstractmethod
    def publish(self, settle: Callable[[str], None] = lambda _: None) -> FilePath:
        """Make the version visible to servers and return its path. Before that, call `settle` with its name.

        Raises:
            ExportError: another export published that version first, or MODEL_DIR cannot be written.
        """

    @abc.abstractmethod
    def abandon(self, *, keep: bool) -> None:
        """Release the version. Unless it is published, remove it; with `keep`, leave what the same export can resume."""

    def __enter__(self) -> Self:
        self.reserve()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Abandon the version unless it is published. An error says how many finished shards were kept."""
        is_useful = error is not None and self.header.lasts and not isinstance(error, _SPOILING)
        count = self.finished if is_useful else 0
        if count and isinstance(error, TpuEmbedError):
            kept = "1 finished shard was kept" if count == 1 else f"{count} finished shards were kept"
            error.args = (f"{str(error).removesuffix('.')}. {kept}. Run the same export again to resume.",)
        self.abandon(keep=count > 0)


def check_version(version: int | None) -> None:
    """Raise ConfigError unless `version` is None or a positive integer that a server can read."""
    if version is not None:
        check_count("version", version)
        if version > MAX_VERSION:
            raise ConfigError(f"version must be at most {MAX_VERSION}, got {version}.")


def versions_among(names: Iterable[str]) -> set[int]:
    """Return the version numbers that TensorFlow Serving reads from these names of folders."""
    numbers = {int(name) for name in names if _INTEGER.fullmatch(name)}
    return {number for number in numbers if number <= MAX_VERSION}


@contextlib.contextmanager
def naming_model_dir(model_dir: FilePath) -> Iterator[None]:
    """Turn an OSError, such as that of a full disk, into an ExportError that names MODEL_DIR and the remedy."""
    try:
        yield
    except TpuEmbedError:  # some are OSErrors too, such as CheckpointNotFoundError
        raise
    except OSError as error:
        raise ExportError(f"MODEL_DIR {model_dir}: {_fault(error, is_disk=isinstance(model_dir, Path))}") from error


def _fault(error: OSError, *, is_disk: bool) -> str:
    what = f"cannot be written: {error.strerror or error}."
    if not is_disk:
        if isinstance(error, PermissionError) and "no credentials" not in str(error):
            return f"{what} These credentials are wrong, or may not list, read, write and delete there."
        return f"{what} Create it, or name another bucket." if isinstance(error, MissingBucketError) else what
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "it, or a folder above it, is a file. Name a directory."
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return f"{what} Name a directory that you may write to."
    return f"{what} Free space or repair the disk."
