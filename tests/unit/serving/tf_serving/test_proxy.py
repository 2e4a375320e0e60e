"""Calls of another server: given up, with large inputs, and of a version that has changed there."""

import asyncio
import gc
import threading
import time
import warnings
from typing import Any

import numpy as np
import pytest

from tests.support.serving.doubles import signature
from tpuembed_serving.core.pipeline import INLINE_BYTES, MemoryBudget, Pipeline, Task
from tpuembed_serving.core.servable import LoadedVersion, State, VersionStatus
from tpuembed_serving.core.service import ModelService, ModelSpec
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.grpc.prediction_service import GrpcPredict
from tpuembed_serving.open_inference.metadata import is_ready, model_metadata
from tpuembed_serving.tf_serving.proxy import RemoteExecutor, RemoteModels, RemoteServable, TensorFlowServing

SIGNATURE = signature({"x": "int64"}, {"y": "int64"})


class Calls:
    """Counts calls, and answers none."""

    def __init__(self) -> None:
        self.begun = 0

    async def run(self, *_: Any) -> Any:
        self.begun += 1
        await asyncio.Event().wait()

    def close(self) -> None:
        pass


def test_a_call_that_is_given_up_before_it_begins_leaves_nothing() -> None:
    """Python warned that a coroutine was never awaited."""
    executor, calls = RemoteExecutor(TensorFlowServing("127.0.0.1:1"), 10, 1), Calls()
    predictions: Any = calls
    executor._predictions = predictions
    servable = RemoteServable({"f": SIGNATURE}, {}, "m", 1)

    async def scenario() -> None:
        for begins in (False, True):
            run = executor.submit(servable, SIGNATURE, [np.array([1])], lambda _: None)
            if begins:
                await asyncio.sleep(0)
            executor.give_up(run)
            await asyncio.wait([run])
        await asyncio.sleep(0)
        assert (calls.begun, executor._pending) == (1, 0)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        asyncio.run(scenario())
        gc.collect()
    assert not [str(one.message) for one in found if "never awaited" in str(one.message)]


class Changing(TensorFlowServing):
    """A server whose version becomes another export's."""

    def __init__(self) -> None:
        super().__init__("host:1")
        self.polls, self.newest, self.signature, self.labelled = 0, 1, SIGNATURE, 1

    def states(self) -> Any:
        return self

    def predictions(self) -> Any:
        return self

    def versions(self, _: str) -> list[VersionStatus]:
        self.polls += 1
        return [VersionStatus(self.newest, State.AVAILABLE, None)]

    def definitions(self, _: str, version: int | None, __: str = "") -> tuple[int | None, Any]:
        return version or self.labelled, ({"f": self.signature}, {})

    async def run(self, *_: Any) -> list[Any]:
        return [np.array(b"x-1")]

    def close(self) -> None:
        pass


class Labelled(GrpcPredict):
    """Asks for a label of a model."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label

    def parse(self, body: bytes, _: Any) -> ModelSpec:
        return ModelSpec("m", label=self.label)

    def decoding_bytes(self, body: bytes) -> int:
        return len(body)

    def decode(self, loaded: LoadedVersion, _: Any) -> list[Task]:
        return [Task(loaded.servable.signatures["f"], [np.array([1])])]

    def encode(self, _: LoadedVersion, outputs: Any, __: Any) -> bytes:
        return bytes(outputs[0]["y"].tobytes())


def wait_for_polls(server: Changing) -> None:
    before = server.polls
    while server.polls < before + 2:
        time.sleep(0.001)


def test_a_version_is_read_again_with_each_poll() -> None:
    server = Changing()
    models = RemoteModels(["m"], server, 0.01)
    models.start()
    models.wait_for_first_poll(lambda: False)
    server.signature = signature({"w": "int64"}, {"y": "int64"})
    wait_for_polls(server)
    with models.lease("m", 1) as after:
        assert [one.alias for one in after.servable.signatures["f"].inputs] == ["w"]
    models.stop()


def test_a_version_that_one_replica_lacks_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Changing()
    models, definitions = RemoteModels(["m"], server, 0.01), server.definitions
    faults = {2: StatusError(Code.NOT_FOUND, "gone")}

    def answer(name: str, version: int | None, label: str = "") -> Any:
        if version in faults:
            raise faults[version]
        return definitions(name, version, label)

    def versions(_: str) -> list[VersionStatus]:
        server.polls += 1
        return [VersionStatus(number, State.AVAILABLE, None) for number in (2, 1)]

    monkeypatch.setattr(server, "definitions", answer)
    monkeypatch.setattr(server, "versions", versions)
    models.start()
    models.wait_for_first_poll(lambda: False)
    wait_for_polls(server)
    assert [(one.version, one.state, one.error) for one in models.statuses("m")] == [
        (2, State.START, faults[2]),
        (1, State.AVAILABLE, None),
    ]
    with models.lease("m", None) as loaded:
        assert loaded.version == 1
    faults[1] = faults[2]
    wait_for_polls(server)
    with models.lease("m", None) as loaded:
        assert loaded.version == 1
    models.stop()


def test_a_label_is_asked_for_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop waited for a server that hung, and no health check was answered."""
    server = Changing()
    models, executor = RemoteModels(["m"], server, 10), RemoteExecutor(server, 10, 9)
    definitions, threads, gate = server.definitions, list[str](), threading.Event()

    def asked(name: str, version: int | None, label: str = "") -> Any:
        if label:
            threads.append(threading.current_thread().name)
            gate.wait(10)
            if label == "other":
                raise StatusError(Code.INVALID_ARGUMENT, f"no label {label}")
            return 1, definitions(name, 1)[1]
        return definitions(name, version)

    monkeypatch.setattr(server, "definitions", asked)
    service = ModelService(models)
    pipeline = Pipeline(service, executor, timeout_seconds=10, memory=MemoryBudget(1 << 30))

    async def scenario() -> None:
        calls = [
            asyncio.ensure_future(pipeline.answer(Labelled(label), b"")) for label in ("stable", "stable", "other")
        ]
        metadata = asyncio.ensure_future(service.metadata(ModelSpec("m", label="stable")))
        await asyncio.sleep(0.05)
        assert not any(call.done() for call in (*calls, metadata))
        gate.set()
        assert await calls[0] == await calls[1] == b"x-1"
        with pytest.raises(StatusError, match="no label other"):
            await calls[2]
        assert (await metadata).version == 1
        spec = ModelSpec("m", label="canary")
        assert await is_ready(service, spec)
        with pytest.raises(StatusError, match="serving_default"):  # which it has not
            await model_metadata(service, ModelSpec("m", label="beta"))
        with pytest.raises(StatusError, match="no label other"):
            await is_ready(service, ModelSpec("m", label="other"))

    models.start()
    models.wait_for_first_poll(lambda: False)
    asyncio.run(scenario())
    assert models.labels() == {"m": {"stable": 1, "canary": 1, "beta": 1}}
    assert threading.main_thread().name not in threads
    models.stop()
    pipeline.close()


def test_requests_that_wait_for_a_label_too_long_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory was reserved until the other server had answered the asks of all of them."""
    server, gate = Changing(), threading.Event()
    models, executor = RemoteModels(["m"], server, 10), RemoteExecutor(server, 10, 9)
    definitions, asked = server.definitions, list[str]()

    def hang(name: str, version: int | None, label: str = "") -> Any:
        if label:
            asked.append(label)
            gate.wait(10)
        return definitions(name, version)

    monkeypatch.setattr(server, "definitions", hang)
    body = b"x" * (INLINE_BYTES + 1)
    memory = MemoryBudget(9 * len(body))
    pipeline = Pipeline(ModelService(models), executor, timeout_seconds=0.2, memory=memory)

    async def scenario() -> None:
        calls = [pipeline.answer(Labelled(f"label-{number}"), body) for number in range(8)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [outcome.code for outcome in outcomes if isinstance(outcome, StatusError)] == [
            Code.DEADLINE_EXCEEDED
        ] * 8
        await asyncio.sleep(0.05)
        memory.reserve(7 * len(body))  # the other two are asking
        memory.release(7 * len(body))
        gate.set()
        await asyncio.sleep(0.1)
        memory.reserve(9 * len(body))

    models.start()
    models.wait_for_first_poll(lambda: False)
    asyncio.run(scenario())
    assert len(set(asked)) == 2
    models.stop()
    pipeline.close()


def test_a_label_is_asked_for_again_after_each_poll() -> None:
    server = Changing()
    models = RemoteModels(["m"], server, 0.01)
    models.start()
    models.wait_for_first_poll(lambda: False)
    for version in (1, 2):
        server.labelled = server.newest = version
        wait_for_polls(server)
        with models.lease("m", None, "stable") as loaded:
            assert loaded.version == version
    time.sleep(0.02)
    assert models.labels() == {"m": {}}
    models.stop()
