"""Versions swap under load: no request fails, each is answered by a version that was live, and memory comes back."""

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.export.fakes import write_checkpoint
from tests.support.serving.load import GrpcLoad, Load
from tests.support.serving.models import spec
from tests.support.serving.process import ServerProcess
from tpuembed import export_saved_model


def publish(model_dir: Path, version: int, values: int) -> float:
    """Version n multiplies by n, and holds `values` floats besides; when it appeared, at the earliest."""
    module = tf.Module()
    module.factor = tf.Variable(float(version))
    module.rows = tf.Variable(tf.fill([values], float(version)))
    function = tf.function(lambda x: {"y": x * module.factor + 0.0 * tf.gather(module.rows, 0)})
    staging = model_dir / f".staging-{version}"
    signature = function.get_concrete_function(spec(tf.float32, "x"))
    tf.saved_model.save(module, str(staging), signatures={"serving_default": signature})
    started = time.monotonic()
    staging.rename(model_dir / str(version))
    return started


def resident_mib(server: ServerProcess, kind: str = "VmRSS") -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split(f"{kind}:")[1].split()[0]) / 1024


def swap(
    model_dir: Path, tmp_path: Path, swaps: int, connections: int, values: int, make_load: type[Load] = Load
) -> tuple[Load, list[float]]:
    """All that was asked, checked; and the server's memory after each swap."""
    appeared, gone, resident = {1: publish(model_dir, 1, values)}, {}, []
    with ServerProcess(model_dir, tmp_path / "server.log", "--grpc-port", "0") as server:
        server.wait_for(1)
        with make_load(server, connections) as load:
            for version in range(2, swaps + 2):
                appeared[version] = publish(model_dir, version, values)
                server.wait_for(version)
                server.wait_for(version - 1, "END")
                gone[version - 1] = time.monotonic()
                shutil.rmtree(model_dir / str(version - 1))
                resident.append(resident_mib(server))
        assert server.stop() == 0
        assert "Traceback" not in server.log
    assert load.failed == []
    for one in load.asked:
        version = int(one.version)
        assert appeared[version] <= one.received, one
        assert one.sent <= gone.get(version, float("inf")), one
    assert {int(one.version) for one in load.asked} == set(appeared), "every version has answered"
    return load, resident


@pytest.mark.nightly
def test_a_few_swaps_under_load(tmp_path: Path) -> None:
    model_dir = tmp_path / "scale"
    swap(model_dir, tmp_path, swaps=4, connections=8, values=10)


@pytest.mark.parametrize(
    ("swaps", "values"),
    [(20, 10), pytest.param(100, 2_000_000, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])],
)
@pytest.mark.nightly
def test_swaps_under_load_over_grpc(tmp_path: Path, swaps: int, values: int) -> None:
    load, resident = swap(tmp_path / "scale", tmp_path, swaps, 16, values, make_load=GrpcLoad)
    print(f"{len(load.asked)} calls; MiB after swaps 1, 10 and {swaps}: {[resident[n - 1] for n in (1, 10, swaps)]}")
    assert resident[-1] < resident[9] + 80


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_hundred_swaps_under_load(tmp_path: Path) -> None:
    model_dir = tmp_path / "scale"
    load, resident = swap(model_dir, tmp_path, swaps=100, connections=32, values=2_000_000)
    print(f"{len(load.asked)} requests; MiB after swaps 1, 10, 50, 100: {[resident[n - 1] for n in (1, 10, 50, 100)]}")
    assert len(load.asked) > 10_000
    assert resident[-1] < resident[9] + 80, "8 MB of each of 90 versions would be 700"


@pytest.mark.nightly
def test_mapped_tables_swap_without_a_copy(tmp_path: Path) -> None:
    """Of the two versions' 128 MB, memory of the process itself holds nothing; what it maps is the page cache's."""
    model_dir, rows, dim = tmp_path / "mapped", 250_000, 64
    config = {"features": {"t": {"table": "t", "combiner": "sum"}}}
    export: dict[str, Any] = {"serving_config": config, "layout": "mmap", "workers": 1}
    for version in (1, 2):
        table = np.full((rows, dim), version, np.float32)
        write_checkpoint(tmp_path / f"ckpt-{version}", {"t": table})
        export_saved_model(tmp_path / f"ckpt-{version}", tmp_path / "exported", version=version, **export)
    model_dir.mkdir()
    (tmp_path / "exported" / "1").rename(model_dir / "1")
    spread = np.arange(0, rows, 50).reshape(-1, 100).tolist()

    def ask(server: ServerProcess) -> set[float]:
        status, answer = server.predict({"inputs": {"t": spread}})
        assert status == 200, answer
        return {value for row in answer["outputs"] for value in row}

    with ServerProcess(model_dir, tmp_path / "server.log") as server:
        server.wait_for(1)
        assert ask(server) == {100.0}
        before = resident_mib(server, "RssAnon")
        (tmp_path / "exported" / "2").rename(model_dir / "2")
        server.wait_for(2)
        server.wait_for(1, "END")
        assert ask(server) == {200.0}
        after = resident_mib(server, "RssAnon")
        loads = [line for line in server.log.splitlines() if "is available after" in line]
    print(loads, f"own memory before and after: {before:.0f} and {after:.0f} MiB")
    assert after < before + 40, "a copy would be 61 MiB"
