"""The commands of docker/k8s/sharded run on this machine: shards pull from a store, and the front makes one model of them."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.serving.process import ServerProcess
from tests.support.stores import S3, moto_server
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_shards

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("exports_in_this_process")]

FOLDER = Path(__file__).parents[2] / "docker" / "k8s" / "sharded"
SHARDS = ("shard-0", "shard-1")
BUCKET, STORED = "BUCKET", "models/rec"


@pytest.fixture(scope="module")
def store() -> Iterator[S3]:
    with moto_server() as server:
        yield server


def checkpoint(folder: Path, step: int) -> tuple[str, dict[str, Any]]:
    """Those of docs/how-to/several-servers.md, and the tables."""
    tf.random.set_seed(step)
    features = {
        "user": FeatureConfig(TableConfig(1000, 8, "users")),
        "watched": FeatureConfig(TableConfig(5000, 8, "videos")),
    }
    layer = TPUEmbedding(features, optimizer="adagrad")
    path = tf.train.Checkpoint(layer=layer).write(str(folder / f"ckpt-{step}"))
    return path, {config.name: table.numpy() for config, table in layer.embedding_tables.items()}


def publish(store: S3, folder: Path, version: int) -> None:
    """As the page does: saved_model.pb last."""
    for shard in SHARDS:
        place = folder / shard / str(version)
        paths = [path for path in place.rglob("*") if path.is_file()]
        for path in sorted(paths, key=lambda path: path.name == "saved_model.pb"):
            store.put("bucket", f"{STORED}/{shard}/{version}/{path.relative_to(place)}", path.read_bytes())


def command(name: str, places: dict[str, str]) -> tuple[list[str], Any]:
    """Return the options of a manifest's container with the places of this machine, and the container."""
    workload = next(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    assert container["command"][:2] == ["tpuembed", "serve"]
    given = [places.get(word, word) for word in container["command"][2:]]
    assert places.keys() <= set(container["command"]), "each is replaced"
    return given, container


def assert_healthy(server: ServerProcess, probe: Any) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel:
        request = health_pb2.HealthCheckRequest(service=probe["grpc"]["service"])
        reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_shards_pull_from_the_store_and_move_to_new_versions(
    store: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    store.make_bucket("bucket")
    path, tables = checkpoint(tmp_path, 1)
    export_shards(path, tmp_path / "rec", shards=len(SHARDS), layout="mmap")
    publish(store, tmp_path / "rec", 1)
    common = {"0.0.0.0": "127.0.0.1", "8501": "0", "8500": "0", "10": "0", "json": "text"}
    content = yaml.safe_load((FOLDER / "config" / "shards.yaml").read_text())
    written = yaml.safe_load((tmp_path / "rec" / "shards.yaml").read_text())
    for shard in written["shards"]:
        shard["address"] = f"dns:///{shard['name']}:8500"
    assert content == written
    with ExitStack() as stack:
        for number, name in enumerate(SHARDS):
            text = (FOLDER / "config" / f"{name}.config").read_text()
            exported = (tmp_path / "rec" / f"{name}.config").read_text()
            assert text == exported.replace(f"{tmp_path}/rec", f"s3://{BUCKET}/{STORED}")
            config = tmp_path / f"{name}.config"
            config.write_text(text.replace(BUCKET, "bucket"))
            places = {"/etc/tpuembed/models.config": str(config), "/cache": str(tmp_path / name), "30": "1"}
            given, container = command(name, common | places)
            server = stack.enter_context(ServerProcess(None, tmp_path / f"{name}.log", *given, bare=True))
            server.wait_for(1)
            assert_healthy(server, container["startupProbe"])
            content["shards"][number]["address"] = f"dns:///{server.grpc_address}"
        file = tmp_path / "shards.yaml"
        file.write_text(yaml.safe_dump(content))
        given, container = command("front", common | {"/etc/tpuembed/shards.yaml": str(file)})
        front = stack.enter_context(ServerProcess(None, tmp_path / "front.log", *given, bare=True))
        front.wait_for(1)
        assert_healthy(front, container["startupProbe"])

        def assert_answers(version: int, tables: dict[str, Any]) -> None:
            status, reply = front.predict({"instances": [{"user": [7], "watched": [1, 2]}]}, f"/versions/{version}")
            assert status == 200, reply
            (found,) = reply["predictions"]
            np.testing.assert_allclose(np.float32(found["user"]), tables["users"][7], rtol=1e-6)
            np.testing.assert_allclose(np.float32(found["watched"]), tables["videos"][[1, 2]].mean(0), rtol=1e-5)

        assert_answers(1, tables)
        path, newer = checkpoint(tmp_path, 2)
        export_shards(path, tmp_path / "rec", layout="mmap")
        publish(store, tmp_path / "rec", 2)
        started = time.monotonic()
        front.wait_for(2)
        assert time.monotonic() - started < 60
        assert_answers(2, newer)
        assert front.request("GET", "/monitoring/prometheus/metrics")[0] == 200
