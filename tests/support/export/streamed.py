"""Tables streamed beside a small graph, and put together: an export without the steps before it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.export.fakes import source_of
from tests.support.export.graphs import save_gathers
from tpuembed.checkpoint import TableInfo
from tpuembed.export.plan.plan import ExportPlan, plan_export
from tpuembed.export.publish.assemble import assemble
from tpuembed.export.publish.folder import Staging
from tpuembed.export.publish.layouts import choose_layout
from tpuembed.export.stream.engines import choose_engine
from tpuembed.export.stream.execute import StreamReport, stream_tables


def export(
    prefix: Path, infos: Mapping[str, TableInfo], model_dir: Path, *, dense: bool = False, **options: Any
) -> tuple[Path, StreamReport]:
    plan: ExportPlan = plan_export(list(infos.values()), **options)
    with Staging(model_dir) as staging:
        engine = choose_engine("local", plan.workers)
        streamed = stream_tables(plan, source_of(prefix), staging.tables, engine)
        keys = save_gathers(plan, staging.path, dense=dense)
        path = assemble(
            staging,
            plan,
            streamed,
            layout=choose_layout("variables", model_dir, None),
            stack_keys=keys,
            signatures={},
            source={"path": str(prefix)},
        )
    assert isinstance(path, Path)
    return path, streamed
