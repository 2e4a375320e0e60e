"""Tables on several servers: one model in front of them answers as one server with all tables does."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tensorflow_serving.apis import predict_pb2

from tests.support import capi
from tests.support.serving.shards import FEATURES, Cluster, Trained, requests
from tpuembed import export_saved_model, export_shards
from tpuembed.errors import ConfigError, ExportError
from tpuembed.export.run import run_export
from tpuembed.export.sharding import export as exporting
from tpuembed.export.sharding.export import plan_shards

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("exports_in_this_process")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def cluster(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("shards")
    export_shards(trained.paths[0], folder / "s", serving_config={"features": FEATURES}, shards=3, layout="mmap")
    with ExitStack() as stack:
        yield Cluster(folder / "s", folder, stack)


@pytest.fixture(scope="module")
def whole(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One export of all tables for each checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    config = {"features": FEATURES}
    return [export_saved_model(path, folder / "m", serving_config=config).path for path in trained.paths]


@pytest.mark.parametrize("batch", [1, 2, 33, 0])
def test_shards_answer_as_one_server(cluster: Cluster, whole: list[Path], batch: int) -> None:
    inputs = requests(np.random.default_rng(batch), batch)
    wanted = capi.predict(whole[0], inputs)
    version, found = cluster.ask(inputs)
    assert version == 1
    assert found.keys() == wanted.keys() == FEATURES.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_rest_pads_lists_and_names_the_shard_of_an_error(cluster: Cluster, whole: list[Path]) -> None:
    row: dict[str, Any] = {"one": 3, "zeros": 99, "sequence": [4], "named": ["item 3"], "small": [], "listed": [1, 2]}
    rows = [
        {**row, "weighed": [5, 6, 7], "weighed_weights": [0.5, 1.0, 2.0]},
        {**row, "weighed": [8], "weighed_weights": [1.5], "named": ["item 1", "item 2"]},
    ]
    status, reply = cluster.front.predict({"instances": rows})
    assert status == 200, reply
    inputs = {
        "one": np.array([3, 3]),
        "zeros": np.array([99, 99]),
        "sequence": np.array([[4], [4]]),
        "named": np.array([[b"item 3", b""], [b"item 1", b"item 2"]], object),
        "small": np.full((2, 1), -1),
        "listed": np.array([[1, 2], [1, 2]]),
        "weighed": np.array([[5, 6, 7], [8, -1, -1]]),
        "weighed_weights": np.array([[0.5, 1, 2], [1.5, 0, 0]], np.float32),
    }
    wanted = capi.predict(whole[0], inputs)
    for number, found in enumerate(reply["predictions"]):
        for name, value in wanted.items():
            np.testing.assert_allclose(np.array(found[name], np.float32), value[number], rtol=1e-6, err_msg=name)
    status, reply = cluster.front.predict({"instances": [{**rows[0], "one": 40}]})
    assert status == 400
    assert "shard shard-" in reply["error"]
    assert "feature one: id 40 of row 0 is not in table a" in reply["error"]
    status, reply = cluster.front.predict({"inputs": {**rows[0], "one": [1, 2], "zeros": [1]}})
    assert status == 400, reply


def test_metadata_and_status_are_those_of_all_shards(cluster: Cluster, whole: list[Path]) -> None:
    status, body = cluster.front.request("GET", "/v1/models/s/metadata")
    reply = json.loads(body)
    assert status == 200
    signature = reply["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["inputs"].keys() == {*FEATURES, "weighed_weights"}
    assert signature["outputs"].keys() == FEATURES.keys()
    status, body = cluster.front.request("GET", "/v1/models/s")
    reply = json.loads(body)
    assert [(one["version"], one["state"]) for one in reply["model_version_status"]] == [("1", "AVAILABLE")]
    assert cluster.front.request("GET", "/readyz")[0] == 200


def test_a_call_for_another_shard_is_refused(cluster: Cluster) -> None:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "shard-0"
    with grpc.insecure_channel(cluster.servers["shard-0"][0].grpc_address) as channel:
        call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        with pytest.raises(grpc.RpcError) as caught:
            call(request.SerializeToString() + b"\xc2\x3e\x07other-1", timeout=60)
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert re.fullmatch(
        r"version 1 of model shard-0 is the shard [0-9a-f]{16}-[0-9a-f]{8} here, and the request is for the shard other-1",
        caught.value.details(),
    )


def test_versions_move_under_load_and_no_answer_mixes_two(trained: Trained, whole: list[Path], tmp_path: Path) -> None:
    config = {"features": FEATURES}
    export_shards(trained.paths[0], tmp_path / "s", serving_config=config, shards=3)
    inputs = requests(np.random.default_rng(5), 8)
    wanted = [capi.predict(version, inputs) for version in whole]
    with ExitStack() as stack:
        cluster = Cluster(tmp_path / "s", tmp_path, stack, 2)

        def check(version: int, found: dict[str, Any]) -> None:
            for name, value in wanted[version - 1].items():
                np.testing.assert_array_equal(found[name], value, err_msg=f"{name} of version {version}")

        with cluster.under_load(inputs, check) as seen:
            report = export_shards(trained.paths[1], tmp_path / "s", serving_config=config)
            assert report.version == 2
        assert seen[0] == 1
        assert seen[-1] == 2
        assert cluster.ask(inputs, version=1)[0] == 1, "the version before is still there"


def test_a_replica_that_dies_or_stops_answering_is_not_missed(
    trained: Trained, whole: list[Path], tmp_path: Path
) -> None:
    export_shards(trained.paths[0], tmp_path / "s", serving_config={"features": FEATURES}, shards=2)
    inputs = requests(np.random.default_rng(6), 3)
    wanted = capi.predict(whole[0], inputs)
    with ExitStack() as stack:
        cluster = Cluster(tmp_path / "s", tmp_path, stack, 2, "--rest-timeout-ms", "6000")

        def check(count: int) -> None:
            for _ in range(count):
                _, found = cluster.ask(inputs)
                for name, value in wanted.items():
                    np.testing.assert_array_equal(found[name], value, err_msg=name)

        check(4)
        stopped = cluster.servers["shard-0"][0].process.pid
        os.kill(stopped, signal.SIGSTOP)  # every other request waits for it, and is asked again
        try:
            started = time.monotonic()
            check(4)
            assert time.monotonic() - started < 4 * 6
        finally:
            os.kill(stopped, signal.SIGCONT)
        cluster.servers["shard-1"][1].process.kill()
        check(12)
        cluster.servers["shard-1"][0].process.kill()
        with pytest.raises(grpc.RpcError) as caught:
            check(1)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "shard-1" in caught.value.details()


def test_the_placement_of_a_folder_stays(trained: Trained, tmp_path: Path) -> None:
    config = {"features": FEATURES}
    plan = plan_shards(trained.paths[0], tmp_path / "s", serving_config=config, shards=2, ids_per_list={"small": 5000})
    assert not (tmp_path / "s").exists()
    assert sorted(name for shard in plan.shards for name in shard.features) == sorted(FEATURES)
    (alone,) = [shard for shard in plan.shards if "small" in shard.features]
    assert alone.tables == ("e",), "its lookups are as many as all others together"
    first = export_shards(trained.paths[0], tmp_path / "s", serving_config=config, shard_bytes=9000)
    assert all(shard.bytes <= 9000 for shard in first.shards)
    again = export_shards(trained.paths[1], tmp_path / "s", serving_config=config)
    assert (again.version, [shard.tables for shard in again.shards]) == (2, [shard.tables for shard in first.shards])
    with pytest.raises(ConfigError, match="Export into another folder"):
        export_shards(trained.paths[1], tmp_path / "s", serving_config=config, shards=len(first.shards) + 1)
    with pytest.raises(ConfigError, match="shards must be"):
        export_shards(trained.paths[1], tmp_path / "s", serving_config=config, shards=0)
    with pytest.raises(ExportError, match="Give another number"):
        export_shards(trained.paths[1], tmp_path / "s", serving_config=config, version=1)


def test_an_interrupted_export_goes_on(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"features": FEATURES}
    made: list[str] = []

    def fails_at_the_second(checkpoint: Any, request: Any, folder: Path, *given: Any, **options: Any) -> Any:
        if len(made) == 1:
            raise KeyboardInterrupt
        made.append(folder.name)
        return run_export(checkpoint, request, folder, *given, **options)

    monkeypatch.setattr(exporting, "run_export", fails_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        export_shards(trained.paths[0], tmp_path / "s", serving_config=config, shards=3)
    monkeypatch.setattr(exporting, "run_export", run_export)
    others = {name: {**spec, "combiner": "sum"} if "combiner" in spec else spec for name, spec in FEATURES.items()}
    other = export_shards(trained.paths[0], tmp_path / "s", serving_config={"features": others}, shards=3)
    assert (other.version, len(other.reports)) == (2, 3), "another export does not go on with the shards of this one"
    shutil.rmtree(tmp_path / "s")
    made.clear()
    monkeypatch.setattr(exporting, "run_export", fails_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        export_shards(trained.paths[0], tmp_path / "s", serving_config=config, shards=3)
    monkeypatch.setattr(exporting, "run_export", run_export)
    report = export_shards(trained.paths[0], tmp_path / "s", serving_config=config, shards=3)
    assert (report.version, sorted(report.reports)) == (1, ["shard-1", "shard-2"])
    assert export_shards(trained.paths[0], tmp_path / "s", serving_config=config).version == 2
