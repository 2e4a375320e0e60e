"""The destinations that versions are written to, a folder or a store, chosen once."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from tpuembed.errors import ConfigError
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.publish.folder import Staging, check_free, ensure_space
from tpuembed.export.publish.layouts import Layout, choose_layout
from tpuembed.export.publish.reuse import SameTables, find_same_tables, share_tables
from tpuembed.export.publish.tables import Tables
from tpuembed.export.publish.unfinished import Unfinished
from tpuembed.export.stream.execute import StreamReport
from tpuembed.export.stream.resume_log import Header
from tpuembed.files import FilePath, as_path

__all__ = ["Destination", "StagedVersion", "choose_destination"]


class StagedVersion(Protocol):
    """A version being written. A context that commits once, or else leaves only what can be resumed."""

    @property
    def model_dir(self) -> FilePath:
        """Return the folder of the versions."""

    @property
    def path(self) -> Path:
        """Return the local path of the version being written."""

    @property
    def kept(self) -> Sequence[object]:
        """Return the unfinished exports of other requests, as messages name them."""

    @property
    def finished(self) -> int:
        """Return the number of shards that a resumed export would reuse."""

    def is_kept_after(self, error: BaseException) -> bool:
        """Returns True if the next export can resume this one after `error`."""

    def open_tables(self, plan: ExportPlan) -> Tables:
        """Return the place to stream the tables of `plan` to. Call it once the graph is saved."""

    def commit(self, settle: Callable[[str], None]) -> FilePath:
        """Publish the version and return its path. Before that, call `settle` with the version's name."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Destination(Protocol):
    """The place of MODEL_DIR, where versions are written."""

    def check(self, plan: ExportPlan, options: ExportOptions) -> None:
        """Raise an error if the export of `plan` can never be written here, whatever exists already."""

    def check_room(self, plan: ExportPlan, header: Header | None, options: ExportOptions, *, is_shared: bool) -> None:
        """Raise ExportError if the version exists, or if its tables have no room and are not shared."""

    def same_tables(self, key: str) -> SameTables | None:
        """Return a version whose data files can be shared."""

    def share(
        self, same: SameTables, plan: ExportPlan, stage: StagedVersion, on_progress: Callable[[int, int], None]
    ) -> StreamReport | None:
        """Share the data files of `same`, or return None if they cannot be shared."""

    def layout(self, options: ExportOptions) -> Layout:
        """Return the layout that `options` name, for versions served from here."""

    def stage(self, options: ExportOptions, header: Header | None) -> StagedVersion:
        """Start a version."""


def choose_destination(model_dir: str | FilePath) -> Destination:
    """Return the destination for `model_dir`, a path or s3://BUCKET/KEY.

    Raises:
        ConfigError: it is another kind of URL.
    """
    path = as_path(model_dir)
    if isinstance(path, Path):
        return _FolderDestination(path)
    if path.scheme != "s3":
        raise ConfigError(
            f"MODEL_DIR {path}: an export can be written only to a disk or to s3://. Export to a disk and copy "
            "the version, saved_model.pb last."
        )
    from tpuembed.export.publish.store.destination import Store

    return Store(path)


@dataclasses.dataclass(frozen=True)
class _FolderDestination:
    """A destination on a disk."""

    model_dir: Path

    def check(self, plan: ExportPlan, options: ExportOptions) -> None:
        """See Destination. A disk accepts every plan."""

    def check_room(self, plan: ExportPlan, header: Header | None, options: ExportOptions, *, is_shared: bool) -> None:
        """See Destination."""
        check_free(self.model_dir, options.version)
        if is_shared:
            return
        ensure_space(self.model_dir, plan.table_bytes, header, restart=not options.resume)

    def same_tables(self, key: str) -> SameTables | None:
        """See Destination."""
        return find_same_tables(self.model_dir, key)

    def share(
        self, same: SameTables, plan: ExportPlan, stage: StagedVersion, on_progress: Callable[[int, int], None]
    ) -> StreamReport | None:
        """See Destination. Uses hard links."""
        folder = stage.path.parent
        shared = share_tables(same, plan, folder / "shared", on_progress)
        if shared is None:  # the data will be copied, and the space for that was not checked yet
            ensure_space(self.model_dir, plan.table_bytes - Unfinished(folder).bytes)
        return shared

    def layout(self, options: ExportOptions) -> Layout:
        """See Destination."""
        return choose_layout(options.layout, self.model_dir, options.serving_root)

    def stage(self, options: ExportOptions, header: Header | None) -> Staging:
        """See Destination."""
        return Staging(self.model_dir, options.version, header, restart=not options.resume)
