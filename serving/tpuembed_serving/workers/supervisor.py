"""Starts worker processes that share the ports, restarts those that exit, and forwards messages between them.

Every worker has its own listening sockets (SO_REUSEPORT), and the kernel distributes the connections. With one inherited
socket the first worker to wake takes all: of 64 connections at once, one of two workers got 64. This way it got at most 35.
"""

import dataclasses
import itertools
import logging
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from tpuembed.errors import TpuEmbedError
from tpuembed_serving.core.noop import noop
from tpuembed_serving.settings import ModelSettings, ServerSettings
from tpuembed_serving.workers.messages import (
    CHECK,
    RELOAD,
    Answer,
    Ask,
    Gather,
    Listening,
    Result,
    Start,
    States,
    StopTo,
    View,
    merge_states,
)
from tpuembed_serving.workers.process import Exited, WorkerProcess
from tpuembed_serving.workers.stopping import LAST_SECONDS, StopStage

__all__ = ["Supervisor"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 30.0
_STEADY_SECONDS: Final = 60.0
"""A worker that ran this long is restarted after the shortest pause."""


@dataclasses.dataclass
class _Slot:
    """One of the N workers: its current process and the restarts.

    Attributes:
        process: None until its start is due.
        states: the last report of the current process; None before the first.
        start_at: when a new process is due, by `time.monotonic`.
        restarts: whether a process is to answer in place of one that has exited.
    """

    index: int
    process: WorkerProcess | None = None
    states: States | None = None
    listening: bool = False
    started_at: float = 0.0
    start_at: float = 0.0
    restarts: bool = False
    pause: float = _FIRST_PAUSE_SECONDS


@dataclasses.dataclass
class _Question:
    """A Gather that is being answered: the workers that have not answered yet, and the answers so far."""

    reply: Callable[[tuple[Any, ...]], None]
    waiting: set[WorkerProcess]
    payloads: list[Any]


class Supervisor:
    """Does its work in the thread that calls `run`. Other threads may call `stop` and `reload`."""

    def __init__(
        self,
        settings: ServerSettings,
        on_listening: Callable[[], None],
        start: Callable[[int, "queue.SimpleQueue[Any]"], WorkerProcess] = WorkerProcess,
        *,
        on_change: Callable[[View], None] = noop,
        on_configured: Callable[[Sequence[ModelSettings]], None] = noop,
    ) -> None:
        """Prepare the workers.

        `on_listening` is called once, when the first worker listens, `on_change` with each view, and `on_configured`
        with the models of each reload, before the workers get them.
        """
        self._on_configured = on_configured
        self._settings, self._on_listening, self._on_change = settings, on_listening, on_change
        self._start_process = start
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._slots = [_Slot(index) for index in range(settings.workers)]
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count()
        self._view = View({}, ready=False)
        self._stopping = False
        self._kill_at = float("inf")

    def stop(self, stage: StopStage = StopStage.LAME_DUCK) -> None:
        """Make `run` stop the workers up to `stage`, and return once they have exited."""
        self._events.put(_Stop(stage))

    def reload(self, models: Sequence[ModelSettings]) -> None:
        """Make every worker serve `models`; see ModelRepository.reload. Blocks."""
        for topic in (CHECK, RELOAD):
            replies: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
            self._events.put(_OwnCall(topic, tuple(models), replies.put))
            for answer in replies.get():
                if isinstance(answer, Exception):
                    raise answer

    def run(self) -> None:
        """Run the workers until `stop` is called and all have exited."""
        while not (self._stopping and all(slot.process is None for slot in self._slots)):
            self._start_due()
            try:
                event = self._events.get(timeout=self._pause())
            except queue.Empty:
                self._kill_overdue()
                continue
            self._handle(event)

    def _pause(self) -> float | None:
        """Return the seconds until the next start or kill is due, or None if none is."""
        due = [slot.start_at for slot in self._slots if slot.process is None and not self._stopping]
        soonest = min([self._kill_at, *due])
        return None if soonest == float("inf") else max(0.0, soonest - time.monotonic())

    def _start_due(self) -> None:
        now = time.monotonic()
        for slot in self._slots:
            if slot.process is None and not self._stopping and slot.start_at <= now:
                load_first = any(other.listening for other in self._slots)
                slot.process, slot.started_at = self._start_process(slot.index, self._events), now
                slot.process.send(Start(self._settings, load_first))
                slot.process.send(self._view)

    def _handle(self, event: Any) -> None:
        match event:
            case _Stop(stage):
                self._stop_workers(stage)
            case _OwnCall(topic, payload, reply):
                self._ask_all(topic, payload, reply)
            case Exited(process):
                self._note_exit(process)
            case (WorkerProcess() as process, message):
                self._note(process, message)

    def _note(self, process: WorkerProcess, message: Any) -> None:
        slot = self._slots[process.index]
        if slot.process is not process:
            return
        match message:
            case States():
                slot.states = message
                self._tell_view()
            case Listening():
                slot.listening = True
                if slot.restarts:
                    slot.restarts = False
                    logger.info("worker %d answers again", slot.index)
                self._tell_view()
                self._on_listening()
                self._on_listening = noop
            case Gather(number, topic, payload):
                self._ask_all(topic, payload, lambda payloads: process.send(Result(number, payloads)))
            case Answer(number, payload):
                self._note_answer(process, number, payload)

    def _tell_view(self) -> None:
        """Send the merged states to all workers. Workers that do not listen yet count only if none listens."""
        counted = [slot for slot in self._slots if slot.listening] or self._slots
        self._view = merge_states([slot.states for slot in counted if slot.states is not None])
        for process in self._processes():
            process.send(self._view)
        self._on_change(self._view)

    def _processes(self) -> list[WorkerProcess]:
        return [slot.process for slot in self._slots if slot.process is not None]

    def _ask_all(self, topic: str, payload: Any, reply: Callable[[tuple[Any, ...]], None]) -> None:
        if topic == RELOAD:
            try:
                self._settings = dataclasses.replace(self._settings, models=payload)
                self._on_configured(payload)
            except TpuEmbedError as error:
                logger.error("%s", error)
        number = next(self._numbers)
        processes = self._processes()
        self._questions[number] = _Question(reply, set(processes), [])
        for process in processes:
            process.send(Ask(number, topic, payload))
        self._close_answered()

    def _note_answer(self, process: WorkerProcess, number: int, payload: Any) -> None:
        question = self._questions[number]
        question.waiting.discard(process)
        question.payloads.append(payload)
        self._close_answered()

    def _close_answered(self) -> None:
        for number, question in list(self._questions.items()):
            if not question.waiting:
                del self._questions[number]
                question.reply(tuple(question.payloads))

    def _note_exit(self, process: WorkerProcess) -> None:
        slot = self._slots[process.index]
        assert slot.process is process
        code = process.close()
        for question in self._questions.values():
            question.waiting.discard(process)
        slot.process, slot.states, slot.listening = None, None, False
        if self._stopping:
            if code:
                logger.warning("worker %d %s while the server was stopping", slot.index, _ended(code))
        else:
            self._plan_restart(slot, code)
        self._close_answered()
        self._tell_view()

    def _plan_restart(self, slot: _Slot, code: int) -> None:
        now = time.monotonic()
        if now - slot.started_at >= _STEADY_SECONDS:
            slot.pause = _FIRST_PAUSE_SECONDS
        slot.start_at, slot.restarts = now + slot.pause, True
        logger.error("worker %d %s. Restarting it in %g s", slot.index, _ended(code), slot.pause)
        slot.pause = min(2 * slot.pause, _LONGEST_PAUSE_SECONDS)

    def _stop_workers(self, stage: StopStage) -> None:
        settings = self._settings
        seconds = LAST_SECONDS
        if stage < StopStage.CUT_OFF:
            seconds += settings.drain_seconds
        if stage < StopStage.DRAINING:
            seconds += settings.lame_duck_seconds
        self._kill_at = time.monotonic() + seconds
        for process in self._processes():
            if not self._stopping:
                process.terminate()
            if stage > StopStage.LAME_DUCK:
                process.send(StopTo(stage))
        self._stopping = True

    def _kill_overdue(self) -> None:
        if time.monotonic() >= self._kill_at:
            self._kill_at = float("inf")
            for process in self._processes():
                logger.warning("worker %d does not exit in time. Killing it", process.index)
                process.kill()


@dataclasses.dataclass(frozen=True)
class _Stop:
    """An event: the stage that the stop is to reach."""

    stage: StopStage


@dataclasses.dataclass(frozen=True)
class _OwnCall:
    """An event: a question of another thread to all workers."""

    topic: str
    payload: Any
    reply: Callable[[tuple[Any, ...]], None]


def _ended(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
