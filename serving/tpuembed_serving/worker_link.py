"""A worker's end of its channel to the supervisor."""

import concurrent.futures
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from tpuembed_serving.fleet import Answer, Ask, Call, Channel, Listening, Result, States, View

__all__ = ["Alone", "Peers", "WorkerLink"]

logger = logging.getLogger(__name__)

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

    def __init__(self, channel: Channel, orphaned: Callable[[], None]) -> None:
        """`orphaned` is called once where the supervisor is gone."""
        self._channel, self._orphaned = channel, orphaned
        self._handlers: dict[str, Handler] = {}
        self._numbers = itertools.count()
        self._calls: dict[int, concurrent.futures.Future[tuple[Any, ...]]] = {}
        # One thread: what changes a worker is done in the order in which it was asked for, by all of them.
        self._work = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="worker-link")
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
        """What every living worker answers; blocks. The first exception among them is raised."""
        number = next(self._numbers)
        future = self._calls[number] = concurrent.futures.Future()
        self._tell(Call(number, topic, payload))
        answers = future.result()
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
            self._orphaned()

    def _heed(self, message: Any) -> None:
        match message:
            case View():
                self.view = message
            case Ask():
                self._work.submit(self._answer, message)
            case Result(number, payloads):
                self._calls.pop(number).set_result(payloads)

    def _answer(self, ask: Ask) -> None:
        try:
            payload = self._handlers[ask.topic](ask.payload)
        except Exception as error:  # for whoever asked
            payload = error
        self._tell(Answer(ask.number, payload))
