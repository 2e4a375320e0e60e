"""Which requests share a run: of a server whose only thread is busy with the first request until the others wait."""

import concurrent.futures
import contextlib
import dataclasses
import re
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
import pytest

from tests.support.serving.doubles import DoublingServable, wait_for
from tests.support.serving.process import Reply
from tests.support.serving.served import PREDICT, Served, predict_request
from tpuembed_serving import TelemetrySettings
from tpuembed_serving.batching.parameters import BatchingParameters
from tpuembed_serving.core.servable import Array, Merging, Signature
from tpuembed_serving.core.status import Code, StatusError, invalid_argument
from tpuembed_serving.settings import BatchingSettings

FULL = "The batch scheduling queue to which this task was submitted is full"
PROVEN = Merging(is_proven=True)


class Model(DoublingServable):
    """Computes y of x, notes x of each run, and waits in it until `gate` is open. It refuses numbers above 99."""

    def __init__(self, merging: Merging, compute: Callable[[Array], Array]) -> None:
        super().__init__()
        self.gate, self.started, self.proven = threading.Event(), threading.Event(), True
        self.runs: list[Any] = []
        self._merging, self._compute = merging, compute

    def run(self, signature: Signature, inputs: Sequence[Array]) -> list[Array]:
        (x,) = inputs
        self.runs.append(x.tolist())
        self.started.set()
        assert self.gate.wait(60)
        if x.size and x.max() > 99:
            raise invalid_argument(f"{x.max()} is too large")
        return [self._compute(x)]

    def merging(self, signature: Signature) -> Merging | None:
        assert self.proven, "the event loop waits for a proof"
        return self._merging

    def knows_merging(self, signature: Signature) -> bool:
        return self.proven


class Scene(Served):
    """A server of one thread, which one request keeps busy."""

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        batching: BatchingSettings,
        merging: Merging = PROVEN,
        compute: Callable[[Array], Array] = lambda x: x * 2,
        **options: Any,
    ) -> None:
        self.model = Model(merging, compute)
        telemetry = TelemetrySettings(metrics_path="/metrics")
        super().__init__(
            folder, patch, lambda _: self.model, batching=batching, run_threads=1, telemetry=telemetry, **options
        )
        self._pool = concurrent.futures.ThreadPoolExecutor(40)

    def __enter__(self) -> Self:
        super().__enter__()
        wait_for(lambda: self.is_ready)
        return self

    def __exit__(self, *error: Any) -> None:
        self.model.gate.set()
        super().__exit__(*error)
        self._pool.shutdown()

    def ask(self, values: Any) -> "concurrent.futures.Future[Reply]":  # type: ignore[override]
        return self._pool.submit(self.send, "POST", "/v1/models/m:predict", {"inputs": values})

    def occupy(self) -> None:
        """Begin a run of the number 0."""
        self.ask([0])
        assert self.model.started.wait(60)

    @property
    def waiting(self) -> int:
        """The requests in the queue, as the metrics have them."""
        text = self.send("GET", "/metrics").body.decode()
        return int(float(re.findall(r"^:tpuembed:serving:queue_depth (\S+)$", text, re.MULTILINE)[0]))

    def queue(self, *requests: Any) -> "list[concurrent.futures.Future[Reply]]":
        """Ask one after the other, so that they wait in this order."""
        asked = []
        for values in requests:
            before = self.waiting
            asked.append(self.ask(values))
            wait_for(lambda before=before: self.waiting == before + 1)  # type: ignore[misc]
        return asked

    def answers(self, asked: "list[concurrent.futures.Future[Reply]]") -> list[Any]:
        """Open the gate. Returns the outputs, or the text of an error."""
        self.model.gate.set()
        replies = [one.result(60) for one in asked]
        return [reply.value["outputs"] if reply.status == 200 else reply.error for reply in replies]


Start = Callable[..., contextlib.AbstractContextManager[Scene]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    def begin(batching: BatchingSettings | None = None, *more: Any, **options: Any) -> Scene:
        return Scene(tmp_path, monkeypatch, batching or BatchingSettings(), *more, **options)

    return begin


def with_parameters(**parameters: Any) -> BatchingSettings:
    return BatchingSettings(enabled=True, parameters=BatchingParameters(**parameters))


def first(x: Array) -> Array:
    return x.reshape(len(x), -1)[:, 0]


@dataclasses.dataclass(frozen=True)
class Case:
    """`runs` are what the requests run as, after the first one."""

    requests: list[Any]
    runs: list[Any]
    batching: BatchingSettings = dataclasses.field(default_factory=BatchingSettings)
    merging: Merging = PROVEN
    compute: Callable[[Array], Array] = lambda x: x * 2


ONE_BY_ONE = Case([[1], [2]], [[1], [2]])
TOGETHER = Case([[1], [2]], [[1, 2]])
CASES = {
    "in their order": Case([[1, 2], [3], [4, 5]], [[1, 2, 3, 4, 5]]),
    "not proven": dataclasses.replace(ONE_BY_ONE, merging=Merging()),
    "not proven, but wanted": dataclasses.replace(TOGETHER, merging=Merging(), batching=BatchingSettings(enabled=True)),
    "not wanted": dataclasses.replace(ONE_BY_ONE, batching=BatchingSettings(enabled=False)),
    "so many rows at most, and larger requests alone": Case(
        [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2, 3, 4, 5], [0]],
        [[0, 1, 0, 1], [0, 1, 2], [0, 1, 2, 3, 4, 5], [0]],
        BatchingSettings(max_rows=4),
    ),
    "equal shapes": Case([[[1, 2]], [[3]], [[4, 5]], [6], 8, [], [7]], [[[1, 2], [4, 5]], [[3]], [6, 7], 8, []]),
    "shapes that the proof covers": Case(
        [[[1]], [2], [[3]], [4]], [[[1]], [2, 4], [[3]]], merging=Merging(is_proven=True, shapes=((),))
    ),
    "lists that may be padded": Case(
        [[[1, 2]], [[3]]], [[[1, 2], [3, -1]]], merging=Merging(is_proven=True, padding=(-1,)), compute=first
    ),
    "lists that the operator lets pad by their first values": Case(
        [[[[7, 8]]], [[[1], [2]]]],
        [[[[7, 8], [7, 7]], [[1, 1], [2, 1]]]],
        with_parameters(pad_variable_length_inputs=True),
        compute=first,
    ),
    "sizes that the operator allows": Case(
        [[1, 2], [3], [5, 6, 7]], [[1, 2, 3, 3], [5, 6, 7, 5]], with_parameters(max_batch_size=4, allowed_batch_sizes=(2, 4))
    ),
    "a large request in several runs": Case(
        [list(range(8))],
        [[0, 1, 2], [3, 4, 5], [6, 7]],
        with_parameters(max_batch_size=8, enable_large_batch_splitting=True, max_execution_batch_size=3),
    ),
    "outputs of other rows, which are learnt once": Case(
        [[1, 2], [3, 4], [5, 6]], [[1, 2, 3, 4, 5, 6], [1, 2], [3, 4], [5, 6]], compute=lambda x: x[:1]
    ),
    "outputs of more rows": Case(
        [[1, 2], [3, 4]], [[1, 2, 3, 4], [1, 2], [3, 4]], compute=lambda x: np.repeat(x, 2)
    ),
    "an output without rows": Case([[1, 2], [3, 4]], [[1, 2, 3, 4], [1, 2], [3, 4]], compute=np.sum),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_requests_that_wait(start: Start, what: str) -> None:
    case = CASES[what]
    with start(case.batching, case.merging, case.compute) as scene:
        scene.occupy()
        asked = scene.queue(*case.requests)
        assert scene.answers(asked) == [np.asarray(case.compute(np.array(one))).tolist() for one in case.requests]
        assert scene.model.runs[1:] == case.runs
        if "learnt" in what:
            scene.answers([scene.ask([number]) for number in (1, 2)])
            assert sorted(scene.model.runs[-2:]) == [[1], [2]]


def test_one_long_list_does_not_widen_the_rows_of_others_much(start: Start) -> None:
    """A batch of 500 rows and of a list of a million took gigabytes."""
    with start(merging=Merging(is_proven=True, padding=(-1,))) as scene:
        scene.occupy()
        asked = scene.queue([[1] * 3] * 500, [[1] * 60], [[1] * 200_000], [[1] * 160_000])
        scene.answers(asked)
        assert [np.shape(run) for run in scene.model.runs[1:]] == [(501, 60), (2, 200_000)]


def test_a_bad_request_fails_nobody_else(start: Start) -> None:
    with start() as scene:
        scene.occupy()
        asked = scene.queue(*([number] if number != 5 else [100] for number in range(16)))
        assert scene.answers(asked) == [[2 * number] if number != 5 else "100 is too large" for number in range(16)]
        assert len(scene.model.runs) <= 10, "in halves, not one after the other"


def test_what_does_not_fit_into_memory_together_may_alone(start: Start) -> None:
    def small(x: Array) -> Array:
        if x.size > 1:
            raise StatusError(Code.RESOURCE_EXHAUSTED, "OOM")
        return x * 2

    with start(compute=small) as scene:
        scene.occupy()
        assert scene.answers(scene.queue([1], [2], [3])) == [[2], [4], [6]]


def test_requests_run_alone_while_the_proof_is_not_done(start: Start) -> None:
    with start() as scene:
        scene.model.proven = False
        scene.occupy()
        scene.answers(scene.queue([1], [2]))
        assert scene.model.runs == [[0], [1], [2]]
        scene.model.proven = True
        scene.model.gate.clear()
        scene.model.started.clear()
        scene.occupy()
        scene.answers(scene.queue([3], [4]))
        assert scene.model.runs[3:] == [[0], [3, 4]]


def test_who_leaves_or_is_late_while_it_waits_is_never_run_and_makes_room(start: Start) -> None:
    head = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: s\r\ncontent-length: 15\r\n\r\n"
    with start(max_queued_requests=2) as scene, scene.channel() as channel:
        scene.occupy()
        with socket.create_connection(("127.0.0.1", scene.port)) as client:
            client.sendall(head + b'{"inputs": [8]}')
            wait_for(lambda: scene.waiting == 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset the connection
        wait_for(lambda: scene.waiting == 0)
        late = channel.unary_unary(PREDICT).future(predict_request(), timeout=0.2)
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_for(lambda: scene.waiting == 0)
        asked = scene.queue([3], [4])
        full = scene.ask([5]).result()
        assert (full.status, full.headers["retry-after"]) == (503, "1")
        assert full.error.startswith(FULL)
        assert scene.answers(asked) == [[6], [8]]
        assert scene.model.runs == [[0], [3, 4]]
        assert scene.answers([scene.ask([5])]) == [[10]]


def test_a_late_run_still_holds_its_thread(start: Start) -> None:
    with start(max_queued_requests=1) as scene, scene.channel() as channel:
        late = channel.unary_unary(PREDICT).future(predict_request(), timeout=0.2)
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        asked = scene.queue([3])
        assert scene.ask([4]).result().status == 503
        assert scene.answers(asked) == [[6]]


def test_a_full_queue_of_batches_is_unavailable_in_theirs_words(start: Start) -> None:
    with start(with_parameters(max_batch_size=2, max_enqueued_batches=2)) as scene:
        scene.occupy()
        asked = scene.queue([2, 3], [4, 5])
        full = scene.ask([6]).result()
        assert full.status == 503
        assert full.error == f"{FULL}; currently 2 batches enqueued and max_enqueued_batches is 2"
        assert scene.answers(asked) == [[4, 6], [8, 10]]


def test_a_timeout_of_the_operators_is_waited_for_and_a_full_run_is_not(start: Start) -> None:
    with start(with_parameters(max_batch_size=2, batch_timeout_micros=3_600_000_000), rest_timeout_ms=9e6) as scene:
        asked = scene.queue([1])
        assert scene.answers([*asked, scene.ask([2])]) == [[2], [4]]
        assert scene.model.runs == [[1, 2]]


def test_a_request_alone_waits_no_longer_than_the_timeout(start: Start) -> None:
    with start(with_parameters(batch_timeout_micros=20_000)) as scene:
        assert scene.answers([scene.ask([1])]) == [[2]]
