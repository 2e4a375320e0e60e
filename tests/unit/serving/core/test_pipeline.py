"""The pipeline of predictions: limits of rows, shapes and memory, and what is left of work that is given up."""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.messages import refused
from tests.support.serving.doubles import DoublingServable, signature
from tpuembed_serving.core.pipeline import INLINE_BYTES, Check, MemoryBudget, Pipeline, Task
from tpuembed_serving.core.servable import Array, Columns, LoadedVersion
from tpuembed_serving.core.service import ModelSpec
from tpuembed_serving.core.status import Code, StatusError, TooLargeError

SIGNATURE = signature({"a": "int64", "b": "int64"})
SIGNATURE = dataclasses.replace(SIGNATURE, outputs=SIGNATURE.inputs)
MANY = b"x" * (INLINE_BYTES + 1)


class OneModel:
    """Leases one version, and counts open leases."""

    def __init__(self) -> None:
        self.leases = 0

    @contextlib.contextmanager
    def lease(self, _: ModelSpec) -> Iterator[LoadedVersion]:
        self.leases += 1
        try:
            yield LoadedVersion(7, DoublingServable())
        finally:
            self.leases -= 1


class Echo:
    """Returns `outputs`, or the inputs."""

    def __init__(self, *outputs: Array) -> None:
        self.outputs, self.runs, self.given_up = outputs, 0, 0
        self.gate: asyncio.Event | None = None

    def submit(self, _: Any, __: Any, inputs: Sequence[Array], on_outcome: Callable[[Any], None], **___: Any) -> object:
        self.runs += 1
        return asyncio.ensure_future(self._run(list(self.outputs or inputs), on_outcome))

    async def _run(self, outcome: Any, on_outcome: Callable[[Any], None]) -> None:
        if self.gate is not None:
            await self.gate.wait()
        on_outcome(outcome)

    def give_up(self, _: Any) -> None:
        self.given_up += 1


class Request:
    """A prediction of these inputs. Notes the thread of each step; `busy` is called in each."""

    model = "m"
    output_bytes = 100
    log_type = "predict_log"
    is_log_message = False

    def __init__(
        self, *inputs: Array, busy: Callable[[str, Check], None] = lambda *_: None, sig: Any = SIGNATURE
    ) -> None:
        self.inputs, self.busy, self.signature = inputs, busy, sig
        self.threads: dict[str, threading.Thread] = {}

    def _step(self, name: str, check: Check) -> None:
        self.threads[name] = threading.current_thread()
        self.busy(name, check)

    def decoding_bytes(self, body: bytes) -> int:
        return 10 * len(body)

    def parse(self, _: bytes, check: Check) -> ModelSpec:
        self._step("parse", check)
        return ModelSpec("m")

    def decode(self, _: LoadedVersion, check: Check) -> list[Task]:
        self._step("decode", check)
        first: Any = self.inputs[0]
        inputs = first if isinstance(first, Columns) else self.inputs
        return [Task(self.signature, inputs)]

    def encode(self, _: LoadedVersion, outputs: Sequence[Mapping[str, Array]], check: Check) -> bytes:
        self._step("encode", check)
        return b"%d" % sum(array.size for array in outputs[0].values())


def pipeline(executor: "Echo | None" = None, **options: Any) -> Pipeline:
    options = {"timeout_seconds": 10.0, "memory": MemoryBudget(1 << 30), **options}
    service: Any = OneModel()
    run: Any = executor or Echo()
    return Pipeline(service, run, **options)


def answer(pipe: Pipeline, request: Request, body: bytes = b"") -> bytes:
    return asyncio.run(pipe.answer(request, body))


def ids(*shape: int) -> Array:
    return np.ones(shape, np.int64)


class TestLimits:
    def test_another_rank_or_size_than_an_export_needs_is_refused(self) -> None:
        needs = dataclasses.replace(SIGNATURE, shapes=((-1,), (-1, 2)))
        assert answer(pipeline(), Request(ids(3), ids(3, 2), sig=needs)) == b"9"
        for wrong in (ids(3, 1), ids()):
            with refused(StatusError, match=r"\[-1\]"):
                answer(pipeline(), Request(wrong, ids(3, 2), sig=needs))
        with refused(StatusError, match=r"\[3, 3\]"):
            answer(pipeline(), Request(ids(3), ids(3, 3), sig=needs))
        flat = dataclasses.replace(SIGNATURE, shapes=((-1,), (-1,)))
        assert answer(pipeline(), Request(Columns(ids(3, 2)), sig=flat)) == b"6"  # type: ignore[arg-type]


class TestMemory:
    def test_a_body_that_takes_too_much_is_refused_before_it_is_parsed(self) -> None:
        pipe, request = pipeline(memory=MemoryBudget(1 << 20)), Request(ids(1), ids(1))
        with refused(TooLargeError):
            answer(pipe, request, MANY)
        assert not request.threads

    def test_outputs_that_take_too_much_are_refused_before_the_run(self) -> None:
        executor = Echo()
        pipe = pipeline(executor, memory=MemoryBudget(1 << 20))
        wide = dataclasses.replace(SIGNATURE, row_bytes=1 << 19)
        assert answer(pipe, Request(ids(1), ids(1), sig=wide)) == b"2"
        with refused(TooLargeError, match=r"1\.5 MiB"):
            answer(pipe, Request(ids(3), ids(3), sig=wide))
        assert executor.runs == 1

    def test_outputs_of_unknown_size_are_refused_before_they_are_encoded(self) -> None:
        pipe = pipeline(Echo(ids(20_000), ids(1)), memory=MemoryBudget(1 << 20))
        request = Request(ids(1), ids(1))
        with refused(TooLargeError, match=r"1\.9 MiB"):
            answer(pipe, request)
        assert "encode" not in request.threads

    def test_requests_in_flight_share_the_memory_and_give_it_back(self) -> None:
        executor = Echo()
        pipe = pipeline(executor, memory=MemoryBudget(4 << 20))
        wide = dataclasses.replace(SIGNATURE, row_bytes=3 << 20)

        async def scenario() -> None:
            executor.gate = asyncio.Event()
            first = asyncio.create_task(pipe.answer(Request(ids(1), ids(1), sig=wide), b""))
            while not executor.runs:
                await asyncio.sleep(0)
            with refused(StatusError) as caught:
                await pipe.answer(Request(ids(1), ids(1), sig=wide), b"")
            assert caught.value.code is Code.UNAVAILABLE
            executor.gate.set()
            assert await first == b"2"
            assert await pipe.answer(Request(ids(1), ids(1), sig=wide), b"") == b"2"

        asyncio.run(asyncio.wait_for(scenario(), 30))
        assert pipe.memory._used == 0


class TestDeadlines:
    def test_a_step_that_cannot_be_stopped_is_answered_in_time_and_keeps_its_memory(self) -> None:
        gate = threading.Event()

        def busy(name: str, _: Check) -> None:
            if name == "parse":
                assert gate.wait(10)

        pipe = pipeline(timeout_seconds=0.2)

        async def scenario() -> None:
            with pytest.raises(StatusError):
                await pipe.answer(Request(ids(1), ids(1), busy=busy), MANY)
            assert pipe.memory._used == 10 * len(MANY)
            gate.set()
            while pipe.memory._used:
                await asyncio.sleep(0.01)

        asyncio.run(scenario())

    def test_a_client_that_leaves_stops_the_work_and_ends_the_lease(self) -> None:
        stopped = threading.Event()

        def busy(name: str, check: Check) -> None:
            while name == "decode":
                try:
                    check(20_000)
                except StatusError:
                    stopped.set()
                    raise

        pipe = pipeline()

        async def scenario() -> None:
            work = asyncio.create_task(pipe.answer(Request(ids(1), ids(1), busy=busy), b""))
            await asyncio.sleep(0.1)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            assert await asyncio.to_thread(stopped.wait, 10)
            async with asyncio.timeout(10):
                while service.leases:
                    await asyncio.sleep(0.01)

        service: Any = pipe.service
        asyncio.run(scenario())

    def test_a_thread_keeps_its_lease_until_it_stops(self) -> None:
        """Two threads that end one lease could end it twice, and unload a version that others use."""
        entered, gate = threading.Event(), threading.Event()

        def busy(name: str, check: Check) -> None:
            if name == "decode":
                check(20_000)
                entered.set()
                assert gate.wait(10)

        pipe = pipeline()
        service: Any = pipe.service

        async def scenario() -> None:
            work = asyncio.create_task(pipe.answer(Request(ids(1), ids(1), busy=busy), b""))
            assert await asyncio.to_thread(entered.wait, 10)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            assert service.leases == 1
            gate.set()
            async with asyncio.timeout(10):
                while service.leases:
                    await asyncio.sleep(0.01)

        asyncio.run(scenario())


def test_what_the_caller_has_reserved_counts_once() -> None:
    pipe = pipeline(memory=MemoryBudget(10 * len(MANY)))
    used = []
    pipe.memory.reserve(len(MANY))

    def busy(name: str, _: Check) -> None:
        if name == "parse":
            used.append(pipe.memory._used)

    asyncio.run(pipe.answer(Request(ids(1), ids(1), busy=busy), MANY, reserved=len(MANY)))
    assert (used, pipe.memory._used) == ([10 * len(MANY)], len(MANY))


@pytest.mark.parametrize("outputs", [(), (ids(20_000), ids(1))], ids=["parse", "encode"])
def test_after_the_close_work_for_a_thread_is_unavailable(outputs: tuple[Array, ...]) -> None:
    pipe = pipeline(Echo(*outputs))
    pipe.close()
    with pytest.raises(StatusError, match="the server is stopping") as refused:
        answer(pipe, Request(ids(1), ids(1)), b"" if outputs else MANY)
    assert refused.value.code is Code.UNAVAILABLE
    assert pipe.memory._used == 0
