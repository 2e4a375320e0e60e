"""What the processes of one server tell each other, and what their models' states come to together.

A supervisor starts the workers. Each has a pair of connected sockets to it, over which these messages go, pickled.
"""

import dataclasses
import threading
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from tpuembed_serving.models.model import State, VersionStatus
from tpuembed_serving.settings import ServerSettings
from tpuembed_serving.workers.stopping import Stage

__all__ = [
    "CHECK",
    "RELOAD",
    "Answer",
    "Ask",
    "Call",
    "Channel",
    "Listening",
    "Result",
    "Start",
    "States",
    "StopTo",
    "View",
    "merged",
    "together",
]

CHECK: Final = "check"
"""The topic of a Call whose payload is models: whether a worker would refuse them."""
RELOAD: Final = "reload"
"""The topic of a Call whose payload is the models that workers serve from then on, also those that start later."""

Statuses = Mapping[str, Sequence[VersionStatus]]
"""Model -> its versions, newest first."""


@dataclasses.dataclass(frozen=True)
class Start:
    """To a worker, first: what to serve, and whether to load before it listens, as others answer meanwhile."""

    settings: ServerSettings
    load_first: bool


@dataclasses.dataclass(frozen=True)
class States:
    """From a worker: its models' versions, and whether every model has one that is available."""

    models: Statuses
    ready: bool


@dataclasses.dataclass(frozen=True)
class View(States):
    """To every worker: the same of all workers together."""


@dataclasses.dataclass(frozen=True)
class StopTo:
    """To a worker: how far the stop is, once it is further than a lame duck."""

    stage: Stage


@dataclasses.dataclass(frozen=True)
class Listening:
    """From a worker: it answers requests."""


@dataclasses.dataclass(frozen=True)
class Call:
    """From a worker: ask all workers, itself too."""

    number: int
    topic: str
    payload: Any


@dataclasses.dataclass(frozen=True)
class Ask:
    """To a worker: what another one asks."""

    number: int
    topic: str
    payload: Any


@dataclasses.dataclass(frozen=True)
class Answer:
    """From a worker, to an Ask; `payload` may be an exception."""

    number: int
    payload: Any


@dataclasses.dataclass(frozen=True)
class Result:
    """To the worker that called: what those workers answered that live."""

    number: int
    payloads: tuple[Any, ...]


class Channel:
    """One end of a pair; messages of several threads do not mix."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Raises OSError where the other end is gone."""
        with self._lock:
            self._connection.send(message)

    def receive(self) -> Any:
        """The next message; raises EOFError or OSError where the other end is gone. One thread calls it."""
        return self._connection.recv()

    def close(self) -> None:
        """Let go of it."""
        self._connection.close()


def together(workers: Collection[States]) -> View:
    """What clients may rely on, whichever worker answers them."""
    names = sorted({name for worker in workers for name in worker.models})
    models = {name: merged([worker.models.get(name, ()) for worker in workers]) for name in names}
    return View(models, bool(workers) and all(worker.ready for worker in workers))


def merged(workers: Sequence[Sequence[VersionStatus]]) -> list[VersionStatus]:
    """One model's versions, newest first, each as far as the worker is that is least far."""
    by_number = [{status.version: status for status in statuses} for statuses in workers]
    numbers = sorted({number for statuses in by_number for number in statuses}, reverse=True)
    return [_least(number, [statuses.get(number) for statuses in by_number]) for number in numbers]


def _least(number: int, found: Sequence[VersionStatus | None]) -> VersionStatus:
    """A failure counts most. A worker that has not seen a version will load it, unless the others are done with it."""
    known = [status for status in found if status is not None]
    failed = next((status for status in known if status.error is not None), None)
    if failed is not None:
        return failed
    least = min(known, key=lambda status: status.state)
    if len(known) < len(found) and least.state < State.UNLOADING:
        return VersionStatus(number, State.START, None)
    return least
