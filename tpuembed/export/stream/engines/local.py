"""Shards on this machine: plain worker processes, spoken to over pipes.

No multiprocessing: it would import the caller's script again in every worker, and with it perhaps TensorFlow.
"""

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, Self

from tpuembed.errors import TpuEmbedError, WorkerError
from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.stream.batch import Batch, Where
from tpuembed.export.stream.engines.protocol import Job
from tpuembed.export.stream.failures import Failure
from tpuembed.export.stream.shard import ShardResult, Source, ignore

__all__ = ["LocalEngine"]

_EXIT_SECONDS = 10
_RETRY_SECONDS = (1.0, 4.0)
"""How long a new worker waits before it tries again what another one failed at; as many tries as there are numbers."""
# Numerical libraries start a pool of threads per processor, each with its own memory; a worker computes nothing.
_ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}


class LocalEngine:
    """Runs tasks in `workers` processes, each given its next task when it has finished one.

    A task whose worker died, or whose source failed in a way that may pass, is given to a new worker, twice at most.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._started: list[_Worker] = []

    @contextlib.contextmanager
    def starting(self, source: Source, tasks: int) -> Iterator[None]:
        """See StartsEarly."""
        try:
            for _ in range(min(self._workers, tasks)):
                self._started.append(_Worker(source))
            yield
        finally:
            for worker in self._started:
                worker.kill()
            self._started.clear()

    def run(
        self,
        tasks: Sequence[ShardTask],
        job: Job,
        *,
        on_result: Callable[[ShardResult], None] = ignore,
        on_progress: Callable[[int], None] = ignore,
    ) -> list[ShardResult]:
        """See Engine.run. No worker is left when it returns or raises, KeyboardInterrupt included."""
        results: list[ShardResult] = []
        with _Crew(tasks, job, self._workers, self._started) as crew:
            while len(results) < len(tasks):
                for result in crew.receive():
                    results.append(result)
                    on_result(result)
                on_progress(sum(result.bytes for result in results) + crew.written)
        return sorted(results, key=lambda result: result.index)


class _Crew:
    """The workers of one run: at its end they finish, after an exception they are killed."""

    def __init__(self, tasks: Sequence[ShardTask], job: Job, workers: int, started: "list[_Worker]") -> None:
        """`started` are workers that wait for tasks; those that are hired are taken out of it."""
        self._waiting, self._job = deque(job.place.batches(tasks)), job
        self._started = started
        self._count = min(workers, len(self._waiting))
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._failures = Counter[int]()

    def __enter__(self) -> Self:
        try:
            for _ in range(self._count):
                self._hire(self._waiting.popleft())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._end()

    def _finish(self) -> None:
        """Let the workers end, all at once: they have nothing left to do."""
        for worker in self._workers:
            worker.dismiss()
        for worker in self._workers:
            worker.wait()

    def _end(self) -> None:
        self._selector.close()
        for worker in self._workers:
            worker.kill()

    @property
    def written(self) -> int:
        """Bytes of the tasks that are under way."""
        return sum(worker.written for worker in self._workers)

    def receive(self) -> Iterator[ShardResult]:
        """Results, as soon as there is news; the workers that had them get their next tasks."""
        for key, _ in self._selector.select():
            worker: _Worker = key.data
            try:
                for results in worker.receive():
                    yield from results
                    if self._waiting:
                        self._assign(worker, self._waiting.popleft())
            except _MayPass as failure:
                self._replace(worker, failure)

    def _hire(self, task: Batch, delay_seconds: float = 0) -> None:
        started = None if delay_seconds else self._idle()  # one that waits already would not wait for longer
        worker = started or _Worker(self._job.source, delay_seconds)
        self._workers.append(worker)
        self._selector.register(worker.replies, selectors.EVENT_READ, worker)
        self._assign(worker, task)

    def _idle(self) -> "_Worker | None":
        """A worker that was started for this source."""
        if self._started and self._started[-1].source == self._job.source:
            return self._started.pop()
        return None

    def _assign(self, worker: "_Worker", task: Batch) -> None:
        worker.assign(task, self._job.place.where(task))

    def _replace(self, worker: "_Worker", failure: "_MayPass") -> None:
        """Have another worker try again what `worker` failed at; raise what happened when it has failed too often."""
        task = failure.task
        self._failures[task.index] += 1
        failures = self._failures[task.index]
        if failures > len(_RETRY_SECONDS):
            failure.error.args = (f"{failure.error}; it was tried {failures} times",)
            raise failure.error
        warnings.warn(f"{failure.error}; it is tried again", stacklevel=6)
        self._selector.unregister(worker.replies)
        self._workers.remove(worker)
        worker.kill()
        self._hire(task, _RETRY_SECONDS[failures - 1])


class _MayPass(Exception):  # noqa: N818 - the error is inside
    """What happened to `task` need not happen again."""

    def __init__(self, task: Batch, error: TpuEmbedError) -> None:
        super().__init__()
        self.task, self.error = task, error


class _Worker:
    """A worker process and the batch it is at."""

    def __init__(self, source: Source, delay_seconds: float = 0) -> None:
        self.written = 0
        self.source = source
        self._task: Batch | None = None
        self._unread = b""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in kill
        self._process = _spawn(self._stderr)
        assert self._process.stdin
        assert self._process.stdout
        self._tasks, self.replies = self._process.stdin, self._process.stdout
        self._send({"source": dataclasses.asdict(source), "parent": os.getpid(), "delay_seconds": delay_seconds})

    def assign(self, task: Batch, where: Where) -> None:
        """Give it its next batch."""
        self._task, self.written = task, 0
        self._send({**dataclasses.asdict(task), "where": where})

    def receive(self) -> Iterator[list[ShardResult]]:
        """The results of batches among what it has said; waits until it says something.

        Raises:
            TpuEmbedError: its task failed.
            _MayPass: so it did, and another try may succeed; or it died.
        """
        received = os.read(self.replies.fileno(), 1 << 16)
        if not received:
            self._raise_death()
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            yield from self._understand(json.loads(line))

    def dismiss(self) -> None:
        """Let it end: it has nothing left to do."""
        self._tasks.close()

    def wait(self) -> None:
        """Until it has ended, but not forever."""
        with selectors.DefaultSelector() as end:  # `Popen.wait` with a limit only looks now and then, every 50 ms
            end.register(self.replies, selectors.EVENT_READ)
            end.select(_EXIT_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)

    def kill(self) -> None:
        """End it now, if it is still there, and forget it."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._tasks.close()
        self.replies.close()
        self._stderr.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        # A dead worker is noticed where its replies end, with the reason.
        with contextlib.suppress(BrokenPipeError):
            self._tasks.write(json.dumps(message).encode() + b"\n")

    def _understand(self, message: Mapping[str, Any]) -> Iterator[list[ShardResult]]:
        if "error" in message:
            self._raise_failure(Failure(**message["error"]))
        if "progress" in message:
            self.written = message["progress"]
        if "results" in message:
            self.written = 0
            yield [ShardResult(**result) for result in message["results"]]

    def _raise_failure(self, failure: Failure) -> NoReturn:
        assert self._task
        error = failure.error(self._task)
        if failure.may_pass:
            raise _MayPass(self._task, error)
        raise error

    def _raise_death(self) -> NoReturn:
        self.wait()
        assert self._task
        raise _MayPass(self._task, WorkerError(f"{self._task}: its worker process {self._cause_of_death()}"))

    def _cause_of_death(self) -> str:
        code = self._process.returncode
        if code is None:
            return "closed its output and hangs"
        if code < 0:
            hint = " (perhaps by the kernel for want of memory: use fewer workers)" if code == -signal.SIGKILL else ""
            return f"was killed by {signal.Signals(-code).name}{hint}"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "and said nothing")
        return f"exited with code {code}: {last}"


def _spawn(stderr: IO[bytes]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "tpuembed.export.stream.worker"]
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, bufsize=0, env=_environment())
    except OSError as error:
        stderr.close()
        raise WorkerError(f"worker process {sys.executable!r}: cannot be started: {error.strerror}") from None


def _environment() -> dict[str, str]:
    """This process's environment and import path, so that a worker runs the very same code."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {**os.environ, **_ONE_THREAD, "PYTHONPATH": path}
