"""Tables streamed beside a small graph, and put together: an export without the steps before it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.export.fakes import source_of
from tests.support.export.graphs import save_gathers
from tpuembed.checkpoint import TableInfo
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.publish.assemble import assemble
from tpuembed.export.publish.folder import FolderWriter
from tpuembed.export.report import StreamReport
from tpuembed.export.stream.engines import choose_engine
from tpuembed.export.stream.execute import stream_tables


def export(
    prefix: Path, infos: Mapping[str, TableInfo], model_dir: Path, *, dense: bool = False, **options: Any
) -> tuple[Path, StreamReport]:
    plan: ExportPlan = plan_export(list(infos.values()), **options)
    source = source_of(prefix)
    with FolderWriter(model_dir, plan, ExportOptions(), source) as writer:
        streamed = stream_tables(source, writer, choose_engine("local", plan.workers))
        graph = save_gathers(plan, writer.path, dense=dense)
        path = assemble(writer, streamed, graph, {"path": str(prefix)}, {})
    assert isinstance(path, Path)
    return path, streamed
