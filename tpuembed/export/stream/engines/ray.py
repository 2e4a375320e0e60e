"""Runs shards on a Ray cluster. Ray schedules them and retries tasks lost with a worker or node. It moves no table
bytes.

The checkpoint and MODEL_DIR are on storage that every node sees under the same path, or in object stores. tpuembed is
installed on every node.
"""

import contextlib
import dataclasses
import logging
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

from tpuembed.errors import ExportError, MissingExtraError, WorkerError, one_line
from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.publish.version_writer import VersionWriter
from tpuembed.export.stream.batch import Failure, flush_batch, run_batch
from tpuembed.export.stream.engines.protocol import Engine
from tpuembed.export.stream.shard import Batch, ShardResult, Source, Target, ignore

__all__ = ["RayEngine"]

_RETRIES: Final = 3
_CONNECT_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 5.0
"""How long to wait for a task before the head is checked."""
_SILENT_SECONDS: Final = 30.0
"""Half of the time that Ray allows for a head to come back."""
_QUIET: Final = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "error"}


class RayEngine(Engine):
    """Runs at most `workers` tasks at once, each on one CPU of the cluster."""

    def __init__(self, workers: int) -> None:
        """Use the cluster at RAY_ADDRESS, as Ray does: HOST:PORT, "ray://..." or "auto". Without it, start one on this machine."""
        self._workers = workers

    def run(
        self,
        tasks: Sequence[ShardTask],
        source: Source,
        writer: VersionWriter,
        *,
        on_result: Callable[[ShardResult], None] = ignore,
        on_progress: Callable[[int], None] = ignore,
    ) -> list[ShardResult]:
        """See Engine.run. Progress is reported per batch."""
        with _connected() as ray:
            run = ray.remote(num_cpus=1, max_retries=_RETRIES, retry_exceptions=[_MayPassError])(_run)
            results = list[ShardResult]()
            for result in _results(ray, run, tasks, source, writer, self._workers):
                results.append(result)
                on_result(result)
                on_progress(sum(result.bytes for result in results))
        return sorted(results, key=lambda result: result.index)


class _MayPassError(Exception):
    """Raised in a worker to make Ray retry the task."""


def _run(fields: Sequence[Mapping[str, Any]], target: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Run one batch in a worker of Ray. Return its results or its failure as JSON values."""
    shards = [ShardTask(**task) for task in fields]
    try:
        results = run_batch(shards, Target(**target), Source(**source))
        flush_batch(shards, Target(**target))
    except Exception as error:
        failure = Failure.of(error)
        if failure.may_pass:
            raise _MayPassError(failure.message) from None
        return {"failure": dataclasses.asdict(failure)}
    return {"results": [dataclasses.asdict(result) for result in results]}


def _results(
    ray: Any, run: Any, tasks: Sequence[ShardTask], source: Source, writer: VersionWriter, at_once: int
) -> Iterator[ShardResult]:
    """Yield results as they arrive. Cancel the running tasks after an exception."""
    waiting, opened = iter(writer.batches(tasks)), dataclasses.asdict(source)

    def submit(count: int) -> dict[Any, Batch]:
        return {
            run.remote([vars(task) for task in batch.shards], dataclasses.asdict(writer.target(batch)), opened): batch
            for batch in islice(waiting, count)
        }

    head = _Head(ray.get_runtime_context().gcs_address)
    running = submit(at_once)
    try:
        while running:
            done, _ = ray.wait(list(running), num_returns=1, timeout=_LOOK_SECONDS)
            if not done:
                head.check()
            for reference in done:
                yield from _result(ray, reference, running.pop(reference), writer.hint)
            running |= submit(len(done))
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


class _Head:
    """Watches the cluster's head. Without this, Ray ends this process after the head has been gone for a minute."""

    def __init__(self, address: str) -> None:
        self._address, self._silent_since = address, 0.0
        self._is_watched = self._answers()  # the head behind "ray://..." may not be reachable from here

    def check(self) -> None:
        """Raise WorkerError if the head has not answered for too long."""
        if not self._is_watched or self._answers():
            self._silent_since = 0.0
            return
        self._silent_since = self._silent_since or time.monotonic()
        if time.monotonic() - self._silent_since >= _SILENT_SECONDS:
            raise WorkerError(
                f"ray: the cluster's head at {self._address} has not answered for {_SILENT_SECONDS:.0f} seconds. "
                "Restart the cluster, and run the same command again."
            )

    def _answers(self) -> bool:
        try:
            _reach(self._address, _LOOK_SECONDS)
        except OSError:
            return False
        return True


def _result(ray: Any, reference: Any, task: Batch, hint: str) -> list[ShardResult]:
    """Return the results of the task behind `reference`.

    Args:
        ray: the module.
        reference: of what `_run` returned.
        task: begins the messages of errors.
        hint: ends the message about a file that a node cannot find; may be empty.

    Raises:
        WorkerError: Ray lost the task's workers too often.
        TpuEmbedError: the error of the task.
    """
    try:
        reply: dict[str, Any] = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        said = str(error.cause) if isinstance(error.cause, _MayPassError) else f"{task}: {one_line(error.cause)}"
        raise ExportError(f"{said.removesuffix('.')}. It failed {_RETRIES + 1} times.") from None
    except ray.exceptions.RayError as error:
        raise WorkerError(
            f"{task}: Ray lost it {_RETRIES + 1} times: {one_line(error)}. Check the cluster's nodes."
        ) from None
    if "failure" in reply:
        failed = Failure(**reply["failure"]).error(task)
        if hint and isinstance(failed, ExportError) and "No such file" in str(failed):
            failed.args = (f"{str(failed).removesuffix('.')}. {hint}",)
        raise failed
    return [ShardResult(**result) for result in reply["results"]]


@contextlib.contextmanager
def _connected() -> Iterator[Any]:
    """Connect to Ray. At the end, stop what was started here, and leave an existing connection open.

    Raises:
        MissingExtraError: Ray is not installed.
        ExportError: there is no cluster at RAY_ADDRESS.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise MissingExtraError("--engine ray", "ray", "ray") from None
    if ray.is_initialized():
        yield ray
        return
    where = os.environ.get("RAY_ADDRESS") or "local"
    with _notices() as notices:
        try:
            _reach(where)
            ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR, **_options(where))
        except Exception as error:  # Ray raises ConnectionError, ValueError or RuntimeError
            raise _unusable(where, error, notices) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _unusable(where: str, error: Exception, notices: BinaryIO) -> ExportError:
    """Return the error for a cluster that cannot be used. Notices about a token are moved from `notices` into it."""
    notices.seek(0)
    written = notices.read()
    if b"AuthToken" in written or "Authentication" in type(error).__name__:
        notices.seek(0)
        notices.truncate()
        return ExportError(
            f"ray: the cluster at {where!r} refuses the token, or no token is set. Set RAY_AUTH_TOKEN to the "
            "cluster's token, and RAY_AUTH_MODE=token."
        )
    # Ray's message names an internal address.
    said = re.sub(r"Failed to connect to Ray cluster at \S+", "failed to connect", one_line(error))
    return ExportError(
        f"ray: no cluster at {where!r} can be used: {said}. Start one, set RAY_ADDRESS to another, or set "
        "RAY_AUTH_TOKEN if it needs a token."
    )


@contextlib.contextmanager
def _notices() -> Iterator[BinaryIO]:
    """Redirect file descriptor 2 to a file. At the end, write what is left in the file to the original descriptor.

    Ray's own code writes a line every second there, before any log level applies.
    """
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            while block := file.read(1 << 16):
                os.write(2, block)


def _reach(where: str, timeout_seconds: float = _CONNECT_SECONDS) -> None:
    """Raise OSError if HOST:PORT accepts no connection. Ray itself would try for minutes."""
    host, _, port = where.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout_seconds).close()


def _options(where: str) -> dict[str, Any]:
    """Return options for a new local cluster: no dashboard, and this process's import path."""
    if where != "local":
        return {}
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {"include_dashboard": False, "runtime_env": {"env_vars": {"PYTHONPATH": path}}}
