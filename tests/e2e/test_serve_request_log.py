"""`logging_config` of a models.config: sampled requests and their answers in TFRecord files, as TensorFlow reads them."""

import asyncio
import contextlib
import json
import resource
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tensorflow as tf
from tensorflow_serving.apis import (
    classification_pb2,
    inference_pb2,
    predict_pb2,
    prediction_log_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)

from tests.support.messages import said
from tests.support.serving.doubles import wait_for
from tests.support.serving.half_plus_two import save_graph
from tests.support.serving.process import ServerProcess, run_command
from tpuembed_serving import ModelSettings, ServerSettings, create_app
from tpuembed_serving.core.request_record import RequestLogging
from tpuembed_serving.grpc.request_log import RequestLog

NUMBER = 123


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_graph(folder / "half", 2.0)
    save_graph(folder / "quiet", 2.0)
    return folder


def config(models: Path, prefix: Path, rate: float = 1.0) -> str:
    logged = (
        f'logging_config {{ log_collector_config {{ type: "tfrecord" filename_prefix: "{prefix}" }} '
        f"sampling_config {{ sampling_rate: {rate} }} }}"
    )
    return "model_config_list {\n" + "".join(
        f'config {{ name: "{name}" base_path: "{models}/{name}" model_platform: "tensorflow" {more} }}\n'
        for name, more in (("half", logged), ("quiet", ""))
    ) + "}"  # fmt: skip


@contextlib.contextmanager
def serving(models: Path, folder: Path, text: str, *options: str) -> Iterator[ServerProcess]:
    path = folder / "models.config"
    path.write_text(text)
    arguments = ("--config", str(path), "--config-poll-seconds", "0.1", "--grpc-port", "0", *options)
    with ServerProcess(None, folder / "log", *arguments) as server:
        wait_for(lambda: server.request("GET", "/readyz")[0] == 200)
        yield server


def logs(prefix: Path) -> list[Any]:
    """All records, by TensorFlow's reader."""
    files = sorted(map(str, prefix.parent.glob(f"{prefix.name}-*.tfrecord")))
    records = [record.numpy() for record in tf.data.TFRecordDataset(files)] if files else []
    return [prediction_log_pb2.PredictionLog.FromString(record) for record in records]


def add_examples(request: Any) -> None:
    for value in (2.0, 4.0):
        example = request.input.example_list.examples.add()
        example.features.feature["x"].float_list.value.append(value)


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.sampled(1)
def test_every_kind_of_request(models: Path, tmp_path: Path, workers: str) -> None:
    prefix = tmp_path / "logs" / "half"
    sent: Counter[str] = Counter()
    with serving(models, tmp_path, config(models, prefix), "--workers", workers) as server:
        for name in ("half", "quiet"):
            body = json.dumps({"instances": [[2.0], [4.0]]})
            status, answer = server.request("POST", f"/v1/models/{name}:predict", body)
            assert (status, json.loads(answer)) == (200, {"predictions": [[3.0], [4.0]]})
        for method in ("classify", "regress"):
            request: Any = {"signature_name": f"{method}_x_to_y", "examples": [{"x": [2.0]}, {"x": [4.0]}]}
            status, answer = server.request("POST", f"/v1/models/half:{method}", json.dumps(request))
            assert status == 200, answer
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [2.0]}
        status, answer = server.request("POST", "/v2/models/half/infer", json.dumps({"inputs": [tensor]}))
        assert status == 200, answer
        assert server.request("POST", "/v1/models/half:predict", '{"instances": [["a"]]}')[0] == 400
        with grpc.insecure_channel(server.grpc_address) as channel:
            stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
            predict = predict_pb2.PredictRequest()
            predict.model_spec.name = "half"
            predict.inputs["x"].CopyFrom(tf.make_tensor_proto([[6.0]]))
            predicted = stub.Predict(predict, timeout=30)
            classify = classification_pb2.ClassificationRequest()
            classify.model_spec.name, classify.model_spec.signature_name = "half", "classify_x_to_y"
            regress = regression_pb2.RegressionRequest()
            regress.model_spec.name, regress.model_spec.signature_name = "half", "regress_x_to_y"
            multi = inference_pb2.MultiInferenceRequest()
            for method in ("regress", "classify"):
                task = multi.tasks.add(method_name=f"tensorflow/serving/{method}")
                task.model_spec.name, task.model_spec.signature_name = "half", f"{method}_x_to_y"
            for one in (classify, regress, multi):
                add_examples(one)
            classified, regressed = stub.Classify(classify, timeout=30), stub.Regress(regress, timeout=30)
            both = stub.MultiInference(multi, timeout=30)
        assert server.stop() == 0
    found = logs(prefix)
    sent.update(log.WhichOneof("log_type") for log in found)
    assert sent == {"predict_log": 3, "classify_log": 2, "regress_log": 2, "multi_inference_log": 1}
    for log in found:
        about = log.log_metadata
        assert (about.model_spec.name, about.model_spec.version.value) == ("half", NUMBER)
        assert about.sampling_config.sampling_rate == 1.0
        assert abs(getattr(about, "timestamp_secs", time.time()) - time.time()) < 600
    # Messages are logged as they came and went. What REST sends becomes the same messages.
    logged = [(pair.request, pair.response) for log in found for pair in [getattr(log, log.WhichOneof("log_type"))]]
    for pair in ((predict, predicted), (classify, classified), (regress, regressed), (multi, both)):
        assert pair in logged
    numbers = {
        tuple(tf.make_ndarray(log.predict_log.request.inputs["x"]).ravel()): tf.make_ndarray(
            log.predict_log.response.outputs["y"]
        ).tolist()
        for log in found
        if log.HasField("predict_log")
    }
    assert numbers == {(2.0, 4.0): [[3.0], [4.0]], (2.0,): [[3.0]], (6.0,): [[5.0]]}
    for kind, over_grpc in (("classify_log", classified), ("regress_log", regressed)):
        for log in found:
            if log.HasField(kind):
                assert getattr(log, kind).response.result == over_grpc.result
                examples = getattr(log, kind).request.input.example_list.examples
                assert [one.features.feature["x"].float_list.value[0] for one in examples] == [2.0, 4.0]


@pytest.mark.nightly
def test_the_files_warm_a_server_up(models: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "half"
    with serving(models, tmp_path, config(models, prefix)) as server:
        for value in range(5):
            assert server.request("POST", "/v1/models/half:predict", f'{{"instances": [[{value}]]}}')[0] == 200
        assert server.stop() == 0
    (file,) = tmp_path.glob("half-*.tfrecord")
    copy = tmp_path / "copy"
    save_graph(copy, 2.0)
    warmup = copy / f"{NUMBER:08}" / "assets.extra" / "tf_serving_warmup_requests"
    warmup.parent.mkdir(exist_ok=True)
    warmup.write_bytes(file.read_bytes())
    with ServerProcess(copy, tmp_path / "second", "--metrics", "--workers", "1") as server:
        wait_for(lambda: server.request("GET", "/readyz")[0] == 200)
        _, text = server.request("GET", "/monitoring/prometheus/metrics")
        (line,) = [line for line in text.decode().splitlines() if "model_warmup_records_read{" in line]
        assert line.endswith(" 5.0")


def test_sampling_and_reloads(models: Path, tmp_path: Path) -> None:
    """The rate is that of the config in use. Dropping the field stops it."""
    prefix, path = tmp_path / "half", tmp_path / "models.config"
    with serving(models, tmp_path, config(models, prefix, 0.25), "--metrics") as server:

        def count() -> float:
            _, text = server.request("GET", "/monitoring/prometheus/metrics")
            lines = [
                line for line in text.decode().splitlines() if line.startswith(":tensorflow:serving:request_log_count{")
            ]
            assert all('model_name="half",status_code="OK"' in line for line in lines)
            return sum(float(line.split()[-1]) for line in lines)

        def ask(times: int) -> None:
            connection = server.connect()
            for _ in range(times):
                connection.request("POST", "/v1/models/half:predict", '{"instances": [[1.0]]}')
                reply = connection.getresponse()
                assert (reply.status, bool(reply.read())) == (200, True)
            connection.close()

        ask(1000)
        wait_for(lambda: count() == len(logs(prefix)))
        sampled = count()
        assert 170 < sampled < 330, "four standard deviations are 55"
        path.write_text(config(models, prefix, 0.0))
        wait_for(lambda: "config" in server.log and server.log.count("applied") >= 1)
        ask(50)
        path.write_text(config(models, tmp_path / "other"))
        wait_for(lambda: server.log.count("applied") >= 2)
        ask(50)
        wait_for(lambda: len(logs(tmp_path / "other")) == 50)
        assert count() == sampled + 50
        assert len(logs(prefix)) == sampled


@pytest.mark.parametrize("processes", [1, 3])
def test_the_files_are_bounded(models: Path, tmp_path: Path, processes: int) -> None:
    """The newest records stay. Files of others with such a prefix stay too. Each process has its part."""
    prefix = tmp_path / "half"
    kept = tmp_path / "half-notes.tfrecord"
    kept.write_bytes(b"")
    logging = RequestLogging(str(prefix), 1.0)
    app = create_app(
        ServerSettings(models=(ModelSettings(name="half", base_path=models / "half", request_logging=logging),))
    )
    app.request_log = RequestLog(processes=processes, max_bytes=100_000)
    app.pipeline.log = app.request_log.log

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            for number in range(300):
                reply = await client.post("/v1/models/half:predict", json={"instances": [[float(number)]] * 200})
                assert reply.status_code == 200

    app.repository.start()
    wait_for(lambda: app.repository.ready)
    asyncio.run(ask())
    app.executor.close()
    app.repository.stop()
    app.request_log.close()
    assert kept.exists()
    files = [path for path in tmp_path.glob("half-*.tfrecord") if path != kept]
    assert 60_000 < sum(path.stat().st_size for path in files) <= 100_000
    kept.unlink()
    numbers = sorted(int(tf.make_ndarray(log.predict_log.request.inputs["x"])[0, 0]) for log in logs(prefix))
    assert numbers == [*range(300 - len(numbers), 300)]


def test_files_that_others_remove_are_created_again(models: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "logs" / "half"
    with serving(models, tmp_path, config(models, prefix)) as server:

        def ask(value: int) -> None:
            assert server.request("POST", "/v1/models/half:predict", f'{{"instances": [[{value}]]}}')[0] == 200

        ask(1)
        wait_for(lambda: len(logs(prefix)) == 1)
        shutil.rmtree(prefix.parent)
        ask(2)
        wait_for(lambda: len(logs(prefix)) == 1)
        (file,) = prefix.parent.iterdir()
        file.rename(tmp_path / "rotated")
        ask(3)
        wait_for(lambda: len(logs(prefix)) == 1)
    (log,) = logs(prefix)
    assert tf.make_ndarray(log.predict_log.request.inputs["x"]).tolist() == [[3.0]]


def test_a_full_disk_stops_the_log_and_nothing_else(models: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: a write is cut in the middle of a record."""
    prefix = tmp_path / "half"
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with serving(models, tmp_path, config(models, prefix), "--metrics") as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (20_000, hard))
        for number in range(60):
            values = ",".join(f"[{number}.0]" for _ in range(200))
            status, _ = server.request("POST", "/v1/models/half:predict", f'{{"instances": [{values}]}}')
            assert status == 200
        wait_for(lambda: "Requests are not logged; retried in 60 s" in server.log)
        _, text = server.request("GET", "/monitoring/prometheus/metrics")
        assert 'request_log_count{model_name="half",status_code="UNAVAILABLE"}' in text.decode()
        assert server.log.count("cannot be written") == 1
    found = logs(prefix)
    assert 5 < len(found) < 60
    numbers = [int(tf.make_ndarray(log.predict_log.request.inputs["x"])[0, 0]) for log in found]
    assert numbers == [*range(len(numbers))]


def test_a_killed_server_leaves_whole_records(models: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "half"
    with serving(models, tmp_path, config(models, prefix)) as server:
        for _ in range(20):
            assert server.request("POST", "/v1/models/half:predict", '{"instances": [[1.0]]}')[0] == 200
        wait_for(lambda: len(logs(prefix)) == 20)
        server.process.kill()
        server.process.wait()
    assert len(logs(prefix)) == 20


@pytest.mark.parametrize(
    "wrong",
    [
        'log_collector_config { type: "kafka" filename_prefix: "/p" }',
        'log_collector_config { filename_prefix: "p" }',
        'log_collector_config { filename_prefix: "/logs/" }',
        'log_collector_config { filename_prefix: "/p" } sampling_config { sampling_rate: 1.5 }',
        'log_collector_config { filename_prefix: "/p" } sampling_config { sampling_rate: nan }',
        'log_collector_config { filename_prefix: "/p" } sampling_config { sampling_rate: 1 attributes: 1 }',
        "sampling_config { sampling_rate: 1 }",
    ],
)
def test_what_is_refused(models: Path, tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "models.config"
    path.write_text(
        f'model_config_list {{ config {{ name: "half" base_path: "/m" model_platform: "tensorflow" '
        f"logging_config {{ {wrong} }} }} }}"
    )
    done = run_command("serve", "--config", path)
    assert done.returncode == 1
    said(done.stderr)
