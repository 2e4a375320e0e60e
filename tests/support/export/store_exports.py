"""Exports into a store without a graph, by an engine of this process."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.export.fakes import FakeCheckpoint, random_table, source_of
from tests.support.export.in_process import InProcessEngine
from tests.support.stores import S3, S3Proxy
from tpuembed.errors import ExportError
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.publish.store.writer import StoreWriter
from tpuembed.export.publish.version_writer import VersionWriter
from tpuembed.export.report import StreamReport
from tpuembed.export.run import choose_writer
from tpuembed.export.stream.execute import stream_tables
from tpuembed.formats.tensor_bundle import index_path, shard_path, write_index

Array = npt.NDArray[np.float32]

PART_BYTES, SHARD_BYTES = 3000, 2000
TABLES = {name: random_table(rows, 8, seed=rows) for name, rows in (("a", 1), ("b", 300), ("c", 2), ("d", 90))}
TABLES |= {"wide": random_table(50, 16)}


def plan_of(prefix: Path, **options: Any) -> ExportPlan:
    with FakeCheckpoint(str(prefix)) as checkpoint:
        return plan_export(list(checkpoint.tables().values()), **options)


def stage(url: str, plan: ExportPlan, prefix: Path, **options: Any) -> StoreWriter:
    writer = choose_writer(url, plan, ExportOptions(**options), source_of(prefix))
    assert isinstance(writer, StoreWriter)
    return writer


def save_graph(staging: VersionWriter, name: str = "graph") -> None:
    """As much of what TensorFlow saves as an export looks at."""
    (staging.path / "variables").mkdir()
    bundle = staging.path / "variables" / "variables"
    write_index(index_path(bundle), {}, 1)
    shard_path(bundle, 0, 1).write_bytes(b"dense")
    (staging.path / "saved_model.pb").write_text(name)


def fill(staging: StoreWriter, plan: ExportPlan, prefix: Path, **options: Any) -> StreamReport:
    save_graph(staging)
    return stream_tables(source_of(prefix), staging, InProcessEngine(), **options)


def export(
    url: str, prefix: Path, meanwhile: Callable[[StoreWriter], object] = id, **options: Any
) -> tuple[str, StreamReport]:
    """The URL of the version, and how its tables came there; `meanwhile` is called between them and the commit."""
    plan = plan_of(prefix)
    with stage(url, plan, prefix, **options) as staging:
        report = fill(staging, plan, prefix)
        meanwhile(staging)
        return str(staging.publish()), report


def assert_complete(server: S3, bucket: str, version: str, tables: Mapping[str, Array] = TABLES) -> None:
    """The data files are the tables side by side, in the order of their names."""
    found = {key.rpartition("/")[2]: server.get(bucket, key) for key in server.keys(bucket, f"{version}/variables/")}
    wide = tables["wide"].tobytes()
    narrow = b"".join(tables[name].tobytes() for name in "abcd")
    assert found["variables.data-00001-of-00003"] == wide or found["variables.data-00002-of-00003"] == wide
    assert narrow in (found["variables.data-00001-of-00003"], found["variables.data-00002-of-00003"])
    assert f"{version}/saved_model.pb" in server.keys(bucket, version)


def leftovers(server: S3, bucket: str) -> list[str]:
    """Objects of versions in the making, and uploads."""
    return [key for key in server.keys(bucket) if "/.staging" in f"/{key}"] + server.uploads(bucket)


def fail_half_way(proxy: S3Proxy, url: str, prefix: Path, **options: Any) -> None:
    proxy.fault = lambda request: (403, "AccessDenied") if request.part == 3 else None
    with pytest.raises(ExportError):
        export(url, prefix, **options)
    proxy.fault = lambda _: None
