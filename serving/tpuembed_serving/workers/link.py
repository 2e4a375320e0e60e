"""A worker's end of its channel to the supervisor."""

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
    Call,
    Channel,
    Listening,
    Result,
    States,
    StopTo,
    View,
)
from tpuembed_serving.workers.stopping import Stage

__all__ = ["Alone", "Peers", "WorkerLink"]

logger = logging.getLogger(__name__)

_CHANGES: Final = frozenset({CHECK, RELOAD})
_ANSWER_SECONDS: Final = 10.0

Handler = Callable[[Any], Any]


class Peers(Protocol):
    """All processes of one server, as each of them sees them."""

    def register(self, topic: str, handler: Handler) -> None:
        """Answer questions about `topic` with what `handler` returns or raises; before the server starts."""

    def gather(self, topic: str, payload: Any = None) -> list[Any]:
        """What every process answers; blocks. The first exception among them is raised."""


class Alone:
    """The peers of the only process."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def register(self, topic: str, handler: Handler) -> None:
        """See Peers."""
        self._handlers[topic] = handler

    def gather(self, topic: str, payload: Any = None) -> list[Any]:
        """See Peers."""
        return [self._handlers[topic](payload)]


class WorkerLink:
    """Tells the supervisor what this worker's models are up to, and asks all workers at once.

    `register` comes before `start`; every other method may be called from any thread.
    """

    def __init__(self, channel: Channel, stop: Callable[[Stage], None]) -> None:
        """`stop` is called with how far the supervisor says that a stop is; where that is gone, nothing new is answered."""
        self._channel, self._stop = channel, stop
        self._handlers: dict[str, Handler] = {}
        self._numbers = itertools.count()
        self._calls: dict[int, concurrent.futures.Future[tuple[Any, ...]]] = {}
        # What changes a worker is done in one order by all of them, and takes its time. The rest does not wait for it.
        self._changes = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="worker-link-changes")
        self._questions = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="worker-link")
        self._reader = threading.Thread(target=self._read, name="worker-link-reader", daemon=True)
        self.view = View({}, ready=False)

    def register(self, topic: str, handler: Handler) -> None:
        """Answer questions about `topic` with what `handler` returns; what it raises is the answer as well."""
        self._handlers[topic] = handler

    def start(self) -> None:
        """Read what comes."""
        self._reader.start()

    def listening(self) -> None:
        """This worker answers requests."""
        self._tell(Listening())

    def push(self, states: States) -> None:
        """These are the states of this worker's models."""
        self._tell(states)

    def gather(self, topic: str, payload: Any = None) -> list[Any]:
        """What every living worker answers; blocks. The first exception among them is raised.

        Raises:
            StatusError: DEADLINE_EXCEEDED, one does not answer, and was not asked to change anything.
        """
        number = next(self._numbers)
        future = self._calls[number] = concurrent.futures.Future()
        self._tell(Call(number, topic, payload))
        try:
            answers = future.result(None if topic in _CHANGES else _ANSWER_SECONDS)
        except TimeoutError:
            self._calls.pop(number, None)
            text = f"a worker does not answer about {topic} within {_ANSWER_SECONDS:g} s"
            raise StatusError(Code.DEADLINE_EXCEEDED, text) from None
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return list(answers)

    def _tell(self, message: Any) -> None:
        try:
            self._channel.send(message)
        except OSError:  # the supervisor is gone, which the reader sees too
            logger.debug("the supervisor is gone")

    def _read(self) -> None:
        try:
            while True:
                self._heed(self._channel.receive())
        except (EOFError, OSError):
            self._stop(Stage.DRAINING)
            for number in list(self._calls):
                self._calls.pop(number).set_exception(StatusError(Code.CANCELLED, "the server stops"))

    def _heed(self, message: Any) -> None:
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
        except Exception as error:  # for whoever asked
            payload = error
        self._tell(Answer(ask.number, payload))
