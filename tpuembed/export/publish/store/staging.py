"""Writes a version to a store and publishes it.

TensorFlow's files are small and go to a temporary folder of this machine. Table data goes directly to uploads, which no
listing shows. The commit completes the uploads and writes the other files. It writes `saved_model.pb` last, and only if
that object does not exist yet. During the commit, servers see a folder without it, which they cannot load.
"""

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from tpuembed.errors import CheckpointCorruptError, CheckpointMismatchError, ExportError
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.publish.bundle_files import data_file_names
from tpuembed.export.publish.store.failing import failing
from tpuembed.export.publish.store.heartbeat import LeaseRenewer
from tpuembed.export.publish.store.tables import StoreTables
from tpuembed.export.publish.store.version_lease import StoreModelDir, remove_unfinished, reserve_version
from tpuembed.export.publish.unfinished import TABLES, VERSION
from tpuembed.export.stream.resume_log import Header
from tpuembed.files import UrlPath, in_parallel
from tpuembed.saved_model import GRAPH_FILE

__all__ = ["StoreStaging"]

_SPOILING = (CheckpointCorruptError, CheckpointMismatchError)


class StoreStaging:
    """The store's counterpart of `tpuembed.export.publish.folder.Staging`.

    Attributes:
        model_dir: the folder of the versions.
        path: local path of the version being written; empty at the start.
        kept: unfinished exports of other requests that could still be resumed.
    """

    def __init__(self, root: StoreModelDir, version: int | None, header: Header | None, *, restart: bool) -> None:
        """Take over the version that `header` can resume in `root`, or reserve a new one. See `Staging`.

        Raises:
            ExportError: the version exists or belongs to another export, or the store cannot be written.
        """
        self.model_dir, self._root, self._can_go_on = root.path, root, header is not None
        with failing(root.path):
            reserved, kept = reserve_version(root, version, header, restart=restart)
        self.kept: Sequence[str] = kept
        self._lease = LeaseRenewer(root, reserved)
        self._tables: StoreTables | None = None
        self._is_visible = self._is_committing = False
        self._folder = Path(tempfile.mkdtemp(prefix="tpuembed-export-"))
        self.path = self._folder / VERSION
        for folder in (self.path, self._folder / TABLES):
            folder.mkdir()

    def __enter__(self) -> "StoreStaging":
        self._lease.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up the version, unless it is published. Keep what the next export can resume."""
        self._lease.__exit__(kind, error, trace)
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._leave(error)
        except (OSError, ExportError) as failure:
            warnings.warn(
                f"MODEL_DIR {self.model_dir}: the rest of version {self._lease.version} cannot be removed: "
                f"{str(failure).removesuffix('.')}. The next export to this MODEL_DIR removes it.",
                stacklevel=2,
            )
        finally:
            owner = self._lease.record.owner
            if owner is not None:
                owner.end()

    def _leave(self, error: BaseException | None) -> None:
        version = self._lease.version
        if self._is_visible:
            self._root.bucket.delete([self._root.record_key(version)])
            return
        if self._lease.is_taken:
            return  # everything belongs to the other export
        if self._lease.is_gone:
            for upload in self._lease.record.uploads.values():
                self._root.bucket.abort_upload(upload.key, upload.id)
            return
        if error is not None and self.is_kept_after(error):
            self._lease.update(owner=None)
        else:
            self._lease.update()  # raises if another export has taken the version
            remove_unfinished(self._root, version, self._lease.record)

    def is_kept_after(self, error: BaseException) -> bool:
        """Returns True if the next export can resume this one after `error`."""
        if not self._can_go_on or self._is_committing or isinstance(error, _SPOILING) or not self.finished:
            return False
        return not (self._lease.is_taken or self._lease.is_gone)

    @property
    def finished(self) -> int:
        """Return the number of shards that a resumed export would reuse."""
        return len(self._lease.record.finished)

    def open_tables(self, plan: ExportPlan) -> StoreTables:
        """Return the place to stream the tables of `plan` to. Call it once the graph is saved."""
        names = data_file_names(self.path, plan.stacks)
        self._tables = StoreTables(self._root, self._lease, self._folder / TABLES, names)
        return self._tables

    def commit(self, settle: Callable[[str], None] = lambda _: None) -> UrlPath:
        """Write the version, `saved_model.pb` last, and return its URL.

        Args:
            settle: called with the version's name before anything of it is written.

        Raises:
            ExportError: a file cannot be written, or another export has the version.
        """
        assert self._tables
        version = self._lease.version
        settle(str(version))
        others = sorted({*_files(self.path)} - self._tables.names - {GRAPH_FILE.as_posix()})
        with failing(self.model_dir):
            self._lease.update()
            self._is_committing = True
            self._tables.complete()
            in_parallel(lambda name: self._root.bucket.put(self._key(name), self.path / name), others)
            self._lease.update()
            self._publish(self._key(GRAPH_FILE.as_posix()))
        return self._root.path / str(version)

    def _publish(self, key: str) -> None:
        try:
            self._root.bucket.create(key, (self.path / GRAPH_FILE).read_bytes())
        except FileExistsError:
            raise ExportError(
                f"MODEL_DIR {self.model_dir}: version {self._lease.version} exists: another program wrote it "
                "meanwhile. Export again."
            ) from None
        self._is_visible = True

    def _key(self, name: str) -> str:
        return self._root.key(f"{self._lease.version}/{name}")


def _files(folder: Path) -> Iterator[str]:
    """Return the paths, relative to `folder`, of all files below it."""
    return (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
