"""Versions swap under load: no request fails, each is answered by a version that was live, and memory comes back."""

import shutil
import time
from pathlib import Path

import pytest
import tensorflow as tf

from tests.support.memory import resident_bytes
from tests.support.serving.load import Load
from tests.support.serving.models import spec
from tests.support.serving.process import ServerProcess


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


def resident_mib(server: ServerProcess) -> float:
    return resident_bytes(server.process.pid, "VmRSS") / 2**20


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_hundred_swaps_under_load(tmp_path: Path) -> None:
    model_dir, swaps, values = tmp_path / "scale", 100, 2_000_000
    appeared, gone, resident = {1: publish(model_dir, 1, values)}, {}, []
    with ServerProcess(model_dir, tmp_path / "server.log") as server:
        server.wait_for(1)
        with Load(server, 32) as load:
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
    print(f"{len(load.asked)} requests; MiB after swaps 1, 10, 50, 100: {[resident[n - 1] for n in (1, 10, 50, 100)]}")
    assert len(load.asked) > 10_000
    assert resident[-1] < resident[9] + 80, "8 MB of each of 90 versions would be 700"
