"""Graph and table data that do not fit together are found before anything is published."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.export.fakes import info, random_table, source_of, write_checkpoint
from tests.support.export.graphs import save_gathers
from tests.support.messages import refused
from tpuembed.errors import CheckpointError, ExportError
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.publish.assemble import assemble
from tpuembed.export.publish.folder import FolderWriter
from tpuembed.export.publish.layouts import Layout
from tpuembed.export.report import StreamReport
from tpuembed.export.stream.engines import choose_engine
from tpuembed.export.stream.execute import stream_tables

Change = Callable[[StreamReport, dict[str, str]], Any]
KEY = "stack_float32_4/.ATTRIBUTES/VARIABLE_VALUE"


def assemble_with(tmp_path: Path, change: Change) -> Path:
    """Export two tables; `change` spoils what was streamed or the keys."""
    tables = {"a": random_table(10, 4), "b": random_table(10, 8)}
    infos = write_checkpoint(tmp_path / "ckpt", tables)
    plan: ExportPlan = plan_export(list(infos.values()))
    source = source_of(tmp_path / "ckpt")
    with FolderWriter(tmp_path / "model", plan, ExportOptions(), source) as writer:
        streamed = stream_tables(source, writer, choose_engine("local", 1))
        graph = save_gathers(plan, writer.path)
        keys = dict(graph.array_keys)
        change(streamed, keys)
        assemble(writer.path, plan, Layout(), streamed, dataclasses.replace(graph, array_keys=keys), {}, {})
        path = writer.publish()
    assert isinstance(path, Path)
    return path


def test_a_graph_of_other_shapes_is_refused(tmp_path: Path) -> None:
    infos = write_checkpoint(tmp_path / "ckpt", {"a": random_table(10, 4)})
    plan, other = plan_export(list(infos.values())), plan_export([info("a", 11, 4)])
    source = source_of(tmp_path / "ckpt")
    with FolderWriter(tmp_path / "model", plan, ExportOptions(), source) as writer:
        streamed = stream_tables(source, writer, choose_engine("local", 1))
        graph = save_gathers(other, writer.path)
        with refused(ExportError, match="stack 'stack_float32_4'"):
            assemble(writer.path, plan, Layout(), streamed, graph, {}, {})


def published(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "model").iterdir() if not path.name.startswith(".staging-")]


def test_what_fits_is_published(tmp_path: Path) -> None:
    assert assemble_with(tmp_path, lambda *_: None) == tmp_path / "model" / "1"
    assert published(tmp_path) == ["1"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda _, keys: keys.pop("stack_float32_4"), ExportError),
        (lambda _, keys: keys.update(more="k"), ExportError),
        (lambda _, keys: keys.update(stack_float32_4="x/y"), ExportError),
        (
            lambda _, keys: keys.update(stack_float32_4=keys["stack_float32_8"]),
            ExportError,
        ),
        (
            lambda streamed, _: (streamed.folder / "stack_float32_8.data").write_bytes(b"short"),
            CheckpointError,
        ),
    ],
    ids=["stack without key", "key without stack", "unknown key", "two stacks under one key", "short data file"],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: Change, error: type[Exception]) -> None:
    with refused(error):
        assemble_with(tmp_path, change)
    assert published(tmp_path) == []
