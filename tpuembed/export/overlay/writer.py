"""Exports an overlay of a version: finds what changed, and publishes it beside links to the base's files."""

import dataclasses
import fcntl
import filecmp
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tpuembed.errors import ConfigError, ExportError
from tpuembed.export.options import ExportOptions
from tpuembed.export.overlay.base import BaseVersion
from tpuembed.export.overlay.changes import Search, stamped_tables
from tpuembed.export.plan.plan import ExportPlan, format_bytes
from tpuembed.export.publish.folder import FolderWriter, check_free, lock_folder
from tpuembed.export.report import StreamReport
from tpuembed.export.request import ExportRequest
from tpuembed.export.stream.execute import check_source
from tpuembed.export.stream.shard import ShardResult, Source, open_source
from tpuembed.formats.saved_model import GRAPH_FILE
from tpuembed.manifest import NAMES_FOLDER, HistoryEntry

__all__ = ["FULL_GRAPH", "MAX_SHARE", "OverlayWriter", "save_full_graph"]

FULL_GRAPH: Final = Path("assets.extra", "full")
"""The graph that an overlay would have as a full version, so that `compact` needs no model."""
_REWRITTEN: Final = (GRAPH_FILE.name, "variables.index")

# Each overlay has all rows that changed since its base, so it grows from version to version. Beyond this share of the tables'
# bytes a full version costs less: the next overlays start small again, and lookups in it need no second gather, which costs a
# tenth to a half more time in overlays of 10% (docs/performance.md).
MAX_SHARE: Final = 0.15


class OverlayWriter(FolderWriter):
    """Writes an overlay into a folder of this machine. An interrupted one is not resumed.

    Attributes:
        base: the version to link. No prune removes it while the writer is a context.
    """

    def __init__(
        self, model_dir: Path, plan: ExportPlan, options: ExportOptions, source: Source, base: BaseVersion
    ) -> None:
        super().__init__(model_dir, plan, options, source)
        self.header = dataclasses.replace(self.header, lasts=False)
        self.base = base

    def check(self) -> None:
        """See VersionWriter.check. How much space is needed is not known yet."""
        check_free(self.model_dir, self.options.version)
        if self.options.version is not None and self.options.version <= self.base.number:
            raise ConfigError(
                f"version {self.options.version}: is not above its base {self.base.number}, so that servers would go on serving "
                f"the base. Choose a number above {self.base.number}, or leave it out."
            )

    def reserve(self) -> None:
        """See VersionWriter.reserve."""
        super().reserve()
        try:
            self._locks.append(lock_folder(self.base.path, fcntl.LOCK_SH))
        except FileNotFoundError:
            self.abandon(keep=False)
            raise ExportError(
                f"base {self.base.number}: it was removed from MODEL_DIR {self.model_dir} just now. Export again."
            ) from None

    def changes(
        self,
        request: ExportRequest,
        histories: Mapping[str, HistoryEntry],
        on_result: Callable[[ShardResult], None],
        on_progress: Callable[[int, int], None],
    ) -> StreamReport | None:
        """Write the files of the overlay and link those of the base. `plan` then has the overlays.

        Returns:
            The report, or None if more than MAX_SHARE of the tables differs from the base.

        Raises:
            CheckpointError: the checkpoint cannot be read, or does not have its recorded checksums.
            ExportError: the base cannot be read or linked.
        """
        started, folder, plan = time.monotonic(), self.folder / "overlay", self.plan
        folder.mkdir()
        stamped = stamped_tables(plan, self.base, request.whole_tables, histories, self.options.max_error)
        search = Search(request=request, plan=plan, base=self.base, stamped=stamped)
        found = search.run(folder, MAX_SHARE * plan.table_bytes, on_result, on_progress)
        if found is None:
            return None
        stacks, crc32c = found
        with open_source(request.source) as again:  # raises if the source has changed meanwhile
            check_source(again, plan, search.results)
        self.plan = dataclasses.replace(plan, stacks=stacks)
        linked = {entry.name: entry for entry in self.base.manifest.stacks if entry.name not in crc32c}
        for stack in stacks:
            if stack.name in linked:
                data, target = self.base.path / linked[stack.name].file, folder / stack.file
                try:
                    os.link(data, target)
                except OSError as error:
                    raise ExportError(
                        f"file {data}: cannot be linked to {target}: {error.strerror}. Leave base out for a full version."
                    ) from None
        reused = sum(entry.size for entry in linked.values())
        written = sum(array.size for stack in stacks for array in stack.arrays if array.name in crc32c)
        return StreamReport(
            folder=folder,
            crc32c={**crc32c, **{name: entry.crc32c for name, entry in linked.items()}},
            bytes_written=written + reused,
            bytes_reused=reused,
            errors=search.errors(),
            seconds=time.monotonic() - started,
            base=self.base.entry,
            base_files={name: entry.file for name, entry in linked.items()},
            full_crc32c=search.full_crc32c(),
            rows_changed=sum(stack.overlay_rows or 0 for stack in stacks),
            rows_compared=search.rows_compared(),
        )

    def too_many(self) -> str:
        """Return why the export is no overlay, as a sentence without its full stop."""
        of_all = f"{MAX_SHARE:.0%} of the {format_bytes(self.plan.table_bytes)}"
        return f"more than {of_all} of tables changed since version {self.base.number}"


def save_full_graph(save: Callable[[Path], Any], version: Path) -> None:
    """Call `save` with the folder for the graph inside `version`. Files that the version has too are hard links.

    But not those that are written again before the version is published.
    """
    folder = version / FULL_GRAPH
    save(folder)
    for own in ("assets.extra", NAMES_FOLDER):  # warm-up requests and names, which are the version's
        shutil.rmtree(folder / own, ignore_errors=True)
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            same = version / path.relative_to(folder)
            if path.name not in _REWRITTEN and same.is_file() and filecmp.cmp(path, same, shallow=False):
                path.unlink()
                path.hardlink_to(same)
