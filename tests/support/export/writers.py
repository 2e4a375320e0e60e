"""Writers without the steps around them: tables in a folder, and versions without a plan."""

from pathlib import Path
from typing import Any

from tests.support.export.fakes import info
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.publish.folder import FolderWriter
from tpuembed.export.report import StreamReport
from tpuembed.export.stream import execute
from tpuembed.export.stream.engines import Engine
from tpuembed.export.stream.resume_log import Header
from tpuembed.export.stream.shard import Source

HEADER = Header(key="k", source="ckpt", fingerprint="f", table_bytes=14)


class TablesWriter(FolderWriter):
    """Writes the tables of `plan` into `folder`, without a version around them."""

    def __init__(self, folder: Path, plan: ExportPlan, source: Source) -> None:
        super().__init__(folder.parent, plan, ExportOptions(), source)
        self.tables = folder


def stream_tables(plan: ExportPlan, source: Source, folder: Path, engine: Engine, **callbacks: Any) -> StreamReport:
    """Stream the tables of `plan` into `folder`."""
    return execute.stream_tables(source, TablesWriter(folder, plan, source), engine, **callbacks)


def version_writer(
    model_dir: Path, version: int | None = None, header: Header = HEADER, *, restart: bool = False
) -> FolderWriter:
    """Return a writer of the export of `header`, whatever its plan is."""
    options = ExportOptions(version=version, resume=not restart)
    writer = FolderWriter(model_dir, plan_export([info("t", 1, 1)]), options, Source(path="ckpt", fingerprint="f"))
    writer.header = header
    return writer
