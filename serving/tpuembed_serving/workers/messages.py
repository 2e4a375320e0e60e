"""The messages between the processes of one server, and how the states of their models are merged.

A supervisor starts the workers. multiprocessing's connections carry these messages. The need for messages of our own:
a client that asks any worker gets the status, the labels, the metrics and the reload of all workers, as one.
"""

import dataclasses
import itertools
import threading
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

from tpuembed.files import FilePath
from tpuembed_serving.core.servable import State, VersionProgress, VersionStatus
from tpuembed_serving.settings import ServerSettings
from tpuembed_serving.workers.stopping import StopStage

__all__ = [
    "CHECK",
    "RELOAD",
    "Answer",
    "Ask",
    "Channel",
    "Gather",
    "Listening",
    "Result",
    "Start",
    "States",
    "StopTo",
    "View",
    "merge_states",
    "merge_statuses",
]

CHECK: Final = "check"
"""The topic of a Gather whose payload is models: a worker raises if it would refuse them."""
RELOAD: Final = "reload"
"""The topic of a Gather whose payload is the models to serve from then on, also by workers that start later."""

Statuses = Mapping[str, Sequence[VersionStatus]]
"""The versions of each model, newest first."""
_Report = TypeVar("_Report", VersionStatus, VersionProgress)


@dataclasses.dataclass(frozen=True)
class Start:
    """The first message to a worker: what to serve, and whether to load before it listens because others answer already."""

    settings: ServerSettings
    load_first: bool


@dataclasses.dataclass(frozen=True)
class States:
    """From a worker: the versions of its models, whether every model has an available one, and what the log needs."""

    models: Statuses
    ready: bool
    progress: Sequence[VersionProgress] = ()


@dataclasses.dataclass(frozen=True)
class View(States):
    """To every worker: the merged states of all workers."""


@dataclasses.dataclass(frozen=True)
class StopTo:
    """To a worker: the stage of the stop, once it is beyond LAME_DUCK."""

    stage: StopStage


@dataclasses.dataclass(frozen=True)
class Listening:
    """From a worker: it answers requests."""


@dataclasses.dataclass(frozen=True)
class Gather:
    """From a worker: ask all workers, including itself."""

    number: int
    topic: str
    payload: Any


@dataclasses.dataclass(frozen=True)
class Ask:
    """To a worker: a question of another worker, or of the supervisor."""

    number: int
    topic: str
    payload: Any


@dataclasses.dataclass(frozen=True)
class Answer:
    """From a worker: the answer to an Ask. `payload` may be an exception."""

    number: int
    payload: Any


@dataclasses.dataclass(frozen=True)
class Result:
    """To the worker that sent the Gather: the answers of all running workers."""

    number: int
    payloads: tuple[Any, ...]


class Channel:
    """One end of a pair of sockets. Several threads may send."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message. Raises OSError if the other end is closed."""
        with self._lock:
            self._connection.send(message)

    def receive(self) -> Any:
        """Return the next message. Raises EOFError or OSError if the other end is closed. One thread calls it."""
        return self._connection.recv()

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


def merge_states(workers: Collection[States]) -> View:
    """Return the states that clients may rely on, whichever worker answers them."""
    names = sorted({name for worker in workers for name in worker.models})
    models = {name: merge_statuses([worker.models.get(name, ()) for worker in workers]) for name in names}
    progress = _merge_progress([worker.progress for worker in workers])
    return View(models, bool(workers) and all(worker.ready for worker in workers), progress)


def _merge_progress(workers: Sequence[Sequence[VersionProgress]]) -> tuple[VersionProgress, ...]:
    """Return how far each version is in all workers.

    Of several failures, the one with the most tries counts.
    """
    found: dict[tuple[str, FilePath], list[VersionProgress]] = {}
    for one in sorted(itertools.chain.from_iterable(workers), key=lambda one: one.tries, reverse=True):
        found.setdefault((one.model, one.path), []).append(one)
    merged = []
    for reports in found.values():
        failed = next((one for one in reports if one.fault), None)
        merged.append(_least(reports, failed, len(workers)) or reports[0]._replace(state=State.START))
    return tuple(merged)


def merge_statuses(workers: Sequence[Sequence[VersionStatus]]) -> list[VersionStatus]:
    """Return one model's versions, newest first, each in the earliest state that any worker reports."""
    found: dict[int, list[VersionStatus]] = {}
    for status in itertools.chain.from_iterable(workers):
        found.setdefault(status.version, []).append(status)
    merged = []
    for number, reports in sorted(found.items(), reverse=True):
        failed = next((status for status in reports if status.error is not None), None)
        merged.append(_least(reports, failed, len(workers)) or VersionStatus(number, State.START, None))
    return merged


def _least(reports: Sequence[_Report], failed: _Report | None, workers: int) -> _Report | None:
    """Return the report that counts for a version, or None if a worker that has not found the version will load it.

    A failure counts first, then the earliest state. Versions that workers already unload are not loaded any more.
    """
    least = failed or min(reports, key=lambda report: report.state)
    if failed is None and len(reports) < workers and least.state < State.UNLOADING:
        return None
    return least
