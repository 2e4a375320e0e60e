"""The worker's end of its channel to the supervisor."""

import concurrent.futures
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.workers.messages import (
    CHECK,
    RELOAD,
    Answer,
    Ask,
    Channel,
    Gather,
    Listening,
    Result,
    States,
    StopTo,
    View,
)
from tpuembed_serving.workers.stopping import StopStage

__all__ = ["SingleProcess", "WorkerGroup", "WorkerLink"]

logger = logging.getLogger(__name__)

_CHANGES: Final = frozenset({CHECK, RELOAD})
_ANSWER_SECONDS: Final = 10.0

Handler = Callable[[Any], Any]


class WorkerGroup(Protocol):
    """All processes of one server. Each process has one."""

    def register(self, topic: str, handler: Handler) -> None:
        """Answer questions about `topic` with what `handler` returns or raises. Call it before the server starts."""

    def gather(self, topic: str, payload: Any = None) -> list[Any]:
        """Return the answers of all processes. Blocks. Raises the first exception among the answers."""


class SingleProcess:
    """The group of a server that has one process."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def register(self, topic: str, handler: Handler) -> None:
        """See WorkerGroup.register."""
        self._handlers[topic] = handler

    def gather(self, topic: str, payload: Any = None) -> list[Any]:
        """See WorkerGroup.gather."""
        return [self._handlers[topic](payload)]


class WorkerLink:
    """Reports the states of this worker's models to the supervisor, and asks questions of all workers.

    `register` must be called before `start`. Any thread may call the other methods.
    """

    def __init__(self, channel: Channel, stop: Callable[[StopStage], None]) -> None:
        """Use `channel`. `stop` is called with each stage that the supervisor sends, and with DRAINING if it has exited."""
        self._channel, self._stop = channel, stop
        self._handlers: dict[str, Handler] = {}
        self._numbers = itertools.count()
        self._calls: dict[int, concurrent.futures.Future[tuple[Any, ...]]] = {}
        # All workers make changes in one order, which takes time. Other questions do not wait for changes.
        self._changes = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="worker-link-changes")
        self._questions = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="worker-link")
        self._reader = threading.Thread(target=self._read, name="worker-link-reader", daemon=True)
        self.view = View({}, ready=False)

    def register(self, topic: str, handler: Handler) -> None:
        """Answer questions about `topic` with what `handler` returns or raises."""
        self._handlers[topic] = handler

    def start(self) -> None:
        """Start reading messages in a background thread."""
        self._reader.start()

    def listening(self) -> None:
        """Report that this worker answers requests."""
        self._tell(Listening())

    def push(self, states: States) -> None:
        """Report the states of this worker's models."""
        self._tell(states)

    def gather(self, topic: str, payload: Any = None) -> list[Any]:
        """Return the answers of all running workers. Blocks. Raises the first exception among the answers.

        Raises:
            StatusError: DEADLINE_EXCEEDED, a worker did not answer in time. Changes have no time limit.
        """
        number = next(self._numbers)
        future = self._calls[number] = concurrent.futures.Future()
        self._tell(Gather(number, topic, payload))
        try:
            answers = future.result(None if topic in _CHANGES else _ANSWER_SECONDS)
        except TimeoutError:
            self._calls.pop(number, None)
            text = f"a worker did not answer about {topic} within {_ANSWER_SECONDS:g} s"
            raise StatusError(Code.DEADLINE_EXCEEDED, text) from None
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return list(answers)

    def _tell(self, message: Any) -> None:
        try:
            self._channel.send(message)
        except OSError:  # the reader notices it too
            logger.debug("the supervisor has exited")

    def _read(self) -> None:
        try:
            while True:
                self._handle(self._channel.receive())
        except (EOFError, OSError):
            self._stop(StopStage.DRAINING)
            for number in list(self._calls):
                self._calls.pop(number).set_exception(StatusError(Code.CANCELLED, "the server is stopping"))

    def _handle(self, message: Any) -> None:
        match message:
            case View():
                self.view = message
            case StopTo(stage):
                self._stop(stage)
            case Ask():
                pool = self._changes if message.topic in _CHANGES else self._questions
                pool.submit(self._answer, message)
            case Result(number, payloads):
                if (future := self._calls.pop(number, None)) is not None:
                    future.set_result(payloads)

    def _answer(self, ask: Ask) -> None:
        try:
            payload = self._handlers[ask.topic](ask.payload)
        except Exception as error:  # the asking process raises it
            payload = error
        self._tell(Answer(ask.number, payload))
