"""Warm-up records of TensorFlow Serving's own protos are run before a version is available; a bad one fails the load."""

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import prediction_log_pb2

from tests.support.serving.models import spec
from tpuembed_serving.core.servable import Array, Signature
from tpuembed_serving.core.status import Code, LoadStopped, StatusError
from tpuembed_serving.models.warmup import WARMUP_PATH, read_records, warm_up
from tpuembed_serving.tensorflow import session as runtime


@pytest.fixture(scope="module")
def version_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Predict on numbers, classify and regress on examples that have a feature `x`."""
    path = tmp_path_factory.mktemp("warmup") / "7"
    feature = {"x": tf.io.FixedLenFeature([], tf.float32)}

    def scores(examples: Any) -> Any:
        x = tf.io.parse_example(examples, feature)["x"]
        return {"scores": tf.stack([x, 1 - x], axis=1)}

    def values(examples: Any) -> Any:
        return {"outputs": tf.io.parse_example(examples, feature)["x"] * 2}

    functions: dict[str, Any] = {
        "serving_default": tf.function(lambda x: {"y": 1 / tf.cast(tf.gather([1, 2], x), tf.float32)}),
        "classify": tf.function(scores),
        "regress": tf.function(values),
    }
    specs = {"serving_default": spec(tf.int64, "x")}
    signatures = {
        name: function.get_concrete_function(specs.get(name, spec(tf.string, "inputs")))
        for name, function in functions.items()
    }
    tf.saved_model.save(tf.Module(), str(path), signatures=signatures)
    return path


class Watched:
    """A servable that notes which signatures ran, on how many rows."""

    def __init__(self, servable: Any) -> None:
        self._servable = servable
        self.runs: list[tuple[str, int]] = []

    def run(self, signature: Signature, inputs: Sequence[Array]) -> list[Array]:
        self.runs.append((signature.name, len(inputs[0])))
        answer: list[Array] = self._servable.run(signature, inputs)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._servable, name)


@pytest.fixture
def servable(version_dir: Path) -> Any:
    return Watched(runtime.load(version_dir))


def predict_log(*ids: int) -> Any:
    log = prediction_log_pb2.PredictionLog()
    log.predict_log.request.inputs["x"].CopyFrom(tf.make_tensor_proto(np.array(ids, np.int64)))
    return log


def fill(source: Any, *values: float) -> None:
    for value in values:
        source.example_list.examples.add().features.feature["x"].float_list.value.append(value)


def classify_log(signature: str = "classify") -> Any:
    log = prediction_log_pb2.PredictionLog()
    log.classify_log.request.model_spec.signature_name = signature
    fill(log.classify_log.request.input, 0.25, 0.5)
    return log


def regress_log() -> Any:
    log = prediction_log_pb2.PredictionLog()
    log.regress_log.request.model_spec.signature_name = "regress"
    fill(log.regress_log.request.input, 0.25, 0.5, 1)
    return log


def multi_log() -> Any:
    log = prediction_log_pb2.PredictionLog()
    for name in ("classify", "regress"):
        task = log.multi_inference_log.request.tasks.add(method_name=f"tensorflow/serving/{name}")
        task.model_spec.name, task.model_spec.signature_name = "m", name
    fill(log.multi_inference_log.request.input, 1)
    return log


@pytest.fixture
def write(version_dir: Path) -> Any:
    path = version_dir / WARMUP_PATH

    def records(logs: Iterable[Any]) -> Path:
        path.parent.mkdir(exist_ok=True)
        with tf.io.TFRecordWriter(str(path)) as writer:
            for log in logs:
                writer.write(log if isinstance(log, bytes) else log.SerializeToString())
        return path

    yield records
    path.unlink(missing_ok=True)


def nothing() -> None:
    pass


def failure(version_dir: Path, servable: Any) -> StatusError:
    with pytest.raises(StatusError) as caught:
        warm_up(version_dir, servable, nothing)
    assert str(version_dir) not in caught.value.message
    return caught.value


Write = Callable[[Iterable[Any]], Path]


def test_no_file_is_fine(version_dir: Path, servable: Any) -> None:
    assert warm_up(version_dir, servable, nothing) == 0
    assert servable.runs == []


def test_every_kind_of_record_is_run_in_order(version_dir: Path, servable: Any, write: Write) -> None:
    write([predict_log(0, 1, 1), classify_log(), regress_log(), multi_log(), prediction_log_pb2.PredictionLog()])
    assert warm_up(version_dir, servable, nothing) == 5
    assert servable.runs == [("serving_default", 3), ("classify", 2), ("regress", 3), ("classify", 1), ("regress", 1)]


def test_a_record_that_fails_is_named(version_dir: Path, servable: Any, write: Write) -> None:
    write([predict_log(1), predict_log(0, 2), predict_log(1)])
    error = failure(version_dir, servable)
    assert error.code is Code.INVALID_ARGUMENT
    assert error.message.startswith(f"version 7: {WARMUP_PATH}, record 2: indices[1] = 2 is not in [0, 2)")
    assert len(servable.runs) == 2


def test_a_signature_that_is_not_there(version_dir: Path, servable: Any, write: Write) -> None:
    write([classify_log("none")])
    assert failure(version_dir, servable).message.startswith(
        f"version 7: {WARMUP_PATH}, record 1: No signature was found"
    )


def test_kinds_that_theirs_refuses(version_dir: Path, servable: Any, write: Write) -> None:
    log = prediction_log_pb2.PredictionLog()
    log.session_run_log.SetInParent()
    write([log])
    error = failure(version_dir, servable)
    assert (error.code, error.message.split(": ", 2)[2]) == (Code.UNIMPLEMENTED, "Unsupported log_type for warmup: 5")


def test_a_thousand_records_at_most(version_dir: Path, servable: Any, write: Write) -> None:
    empty = [prediction_log_pb2.PredictionLog()] * 1000
    write(empty)
    assert warm_up(version_dir, servable, nothing) == 1000
    write([*empty, predict_log(1)])
    error = failure(version_dir, servable)
    assert error.message.endswith("Number of warmup records exceeds the maximum (1000)")
    assert servable.runs == []


def test_what_is_no_record(version_dir: Path, servable: Any, write: Write) -> None:
    write([b"\xff\xff\xff"])
    assert failure(version_dir, servable).message.endswith("record 1: Failed to parse warmup record")
    path = write([predict_log(0), predict_log(1)])
    whole = path.read_bytes()
    (first,) = list(read_records(path))[:1]
    second = 16 + len(first)
    for damaged, text in (
        (whole[:-1], f"truncated record at {second}"),
        (whole[: second + 5], f"truncated record at {second}"),
        (whole[: second + 14] + b"\0" + whole[second + 15 :], f"corrupted record at {second}"),
        (b"no records at all", "corrupted record at 0"),
        (b"\xff" * 40, "corrupted record at 0"),
    ):
        path.write_bytes(damaged)
        error = failure(version_dir, servable)
        assert error.code is Code.DATA_LOSS
        assert error.message.endswith(f"{text}. Please verify your warmup data is in TFRecord format.")


def test_every_byte_of_a_file_is_checked(write: Write) -> None:
    path = write([predict_log(0)])
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(StatusError):
            list(read_records(path))


def test_a_stop_between_records(version_dir: Path, servable: Any, write: Write) -> None:
    write([predict_log(0)] * 5)

    def stop() -> None:
        if len(servable.runs) == 2:
            raise LoadStopped(Code.CANCELLED, "version 7: the server is stopping")

    with pytest.raises(LoadStopped, match=r"^version 7: the server is stopping$"):
        warm_up(version_dir, servable, stop)
    assert len(servable.runs) == 2


def test_a_server_loads_in_a_thread_of_its_own(version_dir: Path, servable: Any, write: Write) -> None:
    write([predict_log(0), regress_log()])
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.append(warm_up(version_dir, servable, nothing)))
    thread.start()
    thread.join()
    assert counts == [2]
