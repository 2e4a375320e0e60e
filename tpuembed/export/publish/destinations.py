"""Where versions are written: a folder, or a store; chosen once."""

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

__all__ = ["Destination", "Stage", "choose_destination"]


class Stage(Protocol):
    """A version in the making: a context that commits once, or leaves nothing behind but what can be resumed."""

    @property
    def model_dir(self) -> FilePath:
        """Where versions lie."""

    @property
    def path(self) -> Path:
        """Of the version in the making, on this machine."""

    @property
    def kept(self) -> Sequence[object]:
        """What other requests have left unfinished, as messages name it."""

    @property
    def finished(self) -> int:
        """Shards that a next export need not stream again."""

    def is_kept_after(self, error: BaseException) -> bool:
        """Whether the next export can go on with what there is."""

    def open_tables(self, plan: ExportPlan) -> Tables:
        """Where the tables of `plan` are streamed to, once the graph is saved."""

    def commit(self, settle: Callable[[str], None]) -> FilePath:
        """Make the version visible; its path. `settle` is called with its name before."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Destination(Protocol):
    """MODEL_DIR."""

    def check(self, plan: ExportPlan, options: ExportOptions) -> None:
        """Raise where the export by `plan` can never be written here, whatever is there already."""

    def check_room(self, plan: ExportPlan, header: Header | None, options: ExportOptions, *, is_shared: bool) -> None:
        """Raise ExportError where the version is there already, or no room for its tables, if they are not shared."""

    def same_tables(self, key: str) -> SameTables | None:
        """A version whose data files can be shared."""

    def share(
        self, same: SameTables, plan: ExportPlan, stage: Stage, on_progress: Callable[[int, int], None]
    ) -> StreamReport | None:
        """Share them; None where they cannot be."""

    def layout(self, options: ExportOptions) -> Layout:
        """The layout that was asked for, of versions that are served from here."""

    def stage(self, options: ExportOptions, header: Header | None) -> Stage:
        """A version in the making."""


def choose_destination(model_dir: str | FilePath) -> Destination:
    """Where `model_dir` is: a path, or s3://BUCKET/KEY.

    Raises:
        ConfigError: anything else.
    """
    path = as_path(model_dir)
    if isinstance(path, Path):
        return _Folder(path)
    if path.scheme != "s3":
        raise ConfigError(
            f"MODEL_DIR {path}: exports are written to disks and to s3:// alone; export to a disk and copy the version, "
            "saved_model.pb last"
        )
    from tpuembed.export.publish.store.destination import Store

    return Store(path)


@dataclasses.dataclass(frozen=True)
class _Folder:
    """On a disk."""

    model_dir: Path

    def check(self, plan: ExportPlan, options: ExportOptions) -> None:
        """See Destination: a disk takes anything."""

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
        self, same: SameTables, plan: ExportPlan, stage: Stage, on_progress: Callable[[int, int], None]
    ) -> StreamReport | None:
        """See Destination: by hard links."""
        folder = stage.path.parent
        shared = share_tables(same, plan, folder / "shared", on_progress)
        if shared is None:  # nobody has looked yet whether there is room for a copy
            ensure_space(self.model_dir, plan.table_bytes - Unfinished(folder).bytes)
        return shared

    def layout(self, options: ExportOptions) -> Layout:
        """See Destination."""
        return choose_layout(options.layout, self.model_dir, options.serving_root)

    def stage(self, options: ExportOptions, header: Header | None) -> Staging:
        """See Destination."""
        return Staging(self.model_dir, options.version, header, restart=not options.resume)
