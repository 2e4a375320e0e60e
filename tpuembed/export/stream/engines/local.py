"""Runs shards on this machine, in plain worker processes connected by pipes.

multiprocessing is not used: it would import the caller's script in every worker, and perhaps TensorFlow with it.
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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from tpuembed.errors import TpuEmbedError, WorkerError, reason, warn
from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.publish.version_writer import VersionWriter
from tpuembed.export.stream.batch import Failure
from tpuembed.export.stream.engines.protocol import Engine
from tpuembed.export.stream.shard import Batch, ShardResult, Source, Target, ignore

__all__ = ["MALLOC", "LocalEngine"]

_EXIT_SECONDS = 10
_RETRY_SECONDS = (1.0, 4.0)
"""How long a new worker waits before it retries a batch. The length is the number of retries."""
# Numerical libraries start a thread per processor, each with its own memory. A worker does not need them.
_ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}


MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(32 << 20)}
"""How glibc keeps freed memory in workers.

By default each thread of TensorStore keeps the chunks it has freed, in an arena of its own: a table of 128 MiB in chunks of 16 MiB
took 337 MB and 2.3 s. With these it takes 119 MB and 1.7 s.
"""


class LocalEngine(Engine):
    """Runs tasks in `workers` processes. Each gets its next task when it has finished one.

    If a worker dies, or its source fails with an error that may be temporary, a new worker retries the task, at most
    twice.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._started: list[_WorkerProcess] = []

    @contextlib.contextmanager
    def starting(self, source: Source, tasks: int) -> Iterator[None]:
        """See Engine.starting."""
        try:
            for _ in range(min(self._workers, tasks)):
                self._started.append(_WorkerProcess(source))
            yield
        finally:
            for worker in self._started:
                worker.kill()
            self._started.clear()

    def run(
        self,
        tasks: Sequence[ShardTask],
        source: Source,
        writer: VersionWriter,
        *,
        on_result: Callable[[ShardResult], None] = ignore,
        on_progress: Callable[[int], None] = ignore,
    ) -> list[ShardResult]:
        """See Engine.run. All workers have ended when it returns or raises, also after KeyboardInterrupt."""
        results: list[ShardResult] = []
        with _WorkerPool(writer.batches(tasks), source, writer.target, self._workers, self._started) as pool:
            while len(results) < len(tasks):
                for result in pool.receive():
                    results.append(result)
                    on_result(result)
                on_progress(sum(result.bytes for result in results) + pool.written)
        return sorted(results, key=lambda result: result.index)


class _WorkerPool:
    """The worker processes of one run. They end normally at its end, and are killed after an exception."""

    def __init__(
        self,
        batches: Sequence[Batch],
        source: Source,
        target: Callable[[Batch], Target],
        workers: int,
        started: "list[_WorkerProcess]",
    ) -> None:
        """Queue `batches`. `started` are idle workers; those that are used are removed from it."""
        self._waiting, self._source, self._target = deque(batches), source, target
        self._started = started
        self._count = min(workers, len(self._waiting))
        self._workers: list[_WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._failures = Counter[int]()

    def __enter__(self) -> Self:
        try:
            for _ in range(self._count):
                self._start(self._waiting.popleft())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                for worker in self._workers:
                    worker.shut_down()
                for worker in self._workers:
                    worker.wait()
        finally:
            self._end()

    def _end(self) -> None:
        self._selector.close()
        for worker in self._workers:
            worker.kill()

    @property
    def written(self) -> int:
        """Return the bytes written of unfinished tasks."""
        return sum(worker.written for worker in self._workers)

    def receive(self) -> Iterator[ShardResult]:
        """Wait for messages and yield results. Workers that have finished get their next tasks."""
        for key, _ in self._selector.select():
            worker: _WorkerProcess = key.data
            for results in worker.receive():
                yield from results
                if self._waiting:
                    task = self._waiting.popleft()
                    worker.assign(task, self._target(task))
            if worker.failure is not None:
                self._replace(worker, worker.failure)

    def _start(self, task: Batch, delay_seconds: float = 0) -> None:
        if self._started and self._started[-1].source == self._source and not delay_seconds:
            worker = self._started.pop()  # idle, and started without a delay
        else:
            worker = _WorkerProcess(self._source, delay_seconds)
        self._workers.append(worker)
        self._selector.register(worker.replies, selectors.EVENT_READ, worker)
        worker.assign(task, self._target(task))

    def _replace(self, worker: "_WorkerProcess", failure: TpuEmbedError) -> None:
        """Retry the failed task of `worker` in a new worker. Raise the failure if it has failed too often."""
        task = worker.task
        assert task
        self._failures[task.index] += 1
        failures = self._failures[task.index]
        if failures > len(_RETRY_SECONDS):
            failure.args = (f"{str(failure).removesuffix('.')}. It failed {failures} times.",)
            raise failure
        warn(f"{str(failure).removesuffix('.')}. Retrying.")
        self._selector.unregister(worker.replies)
        self._workers.remove(worker)
        worker.kill()
        self._start(task, _RETRY_SECONDS[failures - 1])


class _WorkerProcess:
    """A worker process.

    Attributes:
        task: its current batch.
        written: the bytes that it has written of that.
        failure: of that, if it may be temporary. The worker is of no use then.
    """

    def __init__(self, source: Source, delay_seconds: float = 0) -> None:
        self.written = 0
        self.source = source
        self.task: Batch | None = None
        self.failure: TpuEmbedError | None = None
        self._unread = b""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in kill
        self._process = _spawn(self._stderr)
        assert self._process.stdin
        assert self._process.stdout
        self._tasks, self.replies = self._process.stdin, self._process.stdout
        self._send({"source": dataclasses.asdict(source), "parent": os.getpid(), "delay_seconds": delay_seconds})

    def assign(self, task: Batch, target: Target) -> None:
        """Send the worker its next batch."""
        self.task, self.written = task, 0
        self._send({**dataclasses.asdict(task), "target": dataclasses.asdict(target)})

    def receive(self) -> Iterator[list[ShardResult]]:
        """Wait for messages and yield the results of batches among them.

        Sets `failure` if the worker died, or its task failed with an error that may be temporary.

        Raises:
            TpuEmbedError: its task failed with another error.
        """
        assert self.task
        received = os.read(self.replies.fileno(), 1 << 16)
        if not received:
            self.wait()
            self.failure = WorkerError(f"{self.task}: its worker process {self._cause_of_death()}.")
            return
        *lines, self._unread = (self._unread + received).split(b"\n")
        for message in map(json.loads, lines):
            if "error" in message:
                failure = Failure(**message["error"])
                error = failure.error(self.task)
                if not failure.may_pass:
                    raise error
                self.failure = error
                return
            if "progress" in message:
                self.written = message["progress"]
            if "results" in message:
                self.written = 0
                yield [ShardResult(**result) for result in message["results"]]

    def shut_down(self) -> None:
        """Tell the worker to exit: close its input."""
        self._tasks.close()

    def wait(self) -> None:
        """Wait until it has ended, for _EXIT_SECONDS at most."""
        with selectors.DefaultSelector() as end:  # `Popen.wait` with a timeout polls only every 50 ms
            end.register(self.replies, selectors.EVENT_READ)
            end.select(_EXIT_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)

    def kill(self) -> None:
        """Kill the process if it still runs, and release its files."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._tasks.close()
        self.replies.close()
        self._stderr.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        # A dead worker is noticed, with the reason, at the end of its replies.
        with contextlib.suppress(BrokenPipeError):
            self._tasks.write(json.dumps(message).encode() + b"\n")

    def _cause_of_death(self) -> str:
        code = self._process.returncode
        if code is None:
            return "closed its output but still runs"
        if code < 0:
            hint = (
                " (perhaps by the kernel because memory ran out: use fewer workers)" if code == -signal.SIGKILL else ""
            )
            return f"was killed by {signal.Signals(-code).name}{hint}"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no error output")
        return f"exited with code {code}: {last}"


def _spawn(stderr: IO[bytes]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "tpuembed.export.stream.worker"]
    pipe = subprocess.PIPE
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)  # a worker runs the same code
    environment = {**MALLOC, **os.environ, **_ONE_THREAD, "PYTHONPATH": path}
    try:
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, bufsize=0, env=environment)
    except OSError as error:
        stderr.close()
        raise WorkerError(f"worker process {sys.executable!r}: cannot be started: {reason(error)}.") from None
