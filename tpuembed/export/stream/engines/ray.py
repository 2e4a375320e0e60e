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
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from tpuembed.errors import ExportError, MissingExtraError, WorkerError, one_line
from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.publish.version_writer import VersionWriter
from tpuembed.export.stream.batch import Failure, flush_batch, run_batch
from tpuembed.export.stream.engines.local import MALLOC
from tpuembed.export.stream.engines.protocol import Engine
from tpuembed.export.stream.shard import Batch, ShardResult, Source, Target, ignore

__all__ = ["RayEngine"]

_RETRIES: Final = 3
_CONNECT_SECONDS: Final = 10.0
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

    running = submit(at_once)
    try:
        while running:
            (reference,), _ = ray.wait(list(running), num_returns=1)
            yield from _result(ray, reference, running.pop(reference))
            running |= submit(1)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _result(ray: Any, reference: Any, task: Batch) -> list[ShardResult]:
    """Return the results of the task behind `reference`.

    Args:
        ray: the module.
        reference: of what `_run` returned.
        task: begins the messages of errors.

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
        if isinstance(failed, ExportError) and "No such file" in str(failed):
            failed.args = (f"{failed} Every node of the cluster must see MODEL_DIR under this path.",)
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
    try:
        _reach(where)
        ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR, **_options(where))
    except Exception as error:  # Ray raises ConnectionError, ValueError or RuntimeError
        # Ray's message names an internal address.
        said = re.sub(r"Failed to connect to Ray cluster at \S+", "failed to connect", one_line(error))
        raise ExportError(
            f"ray: no cluster at {where!r} can be used: {said}. Start one, set RAY_ADDRESS to another, or set RAY_AUTH_TOKEN to "
            "the cluster's token, and RAY_AUTH_MODE=token, if it needs one."
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _reach(where: str) -> None:
    """Raise OSError if HOST:PORT accepts no connection. Ray itself would try for minutes."""
    host, _, port = where.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def _options(where: str) -> dict[str, Any]:
    """Return options for a new local cluster: no dashboard, and this process's import path."""
    if where != "local":
        return {}
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {"include_dashboard": False, "runtime_env": {"env_vars": {"PYTHONPATH": path, **MALLOC}}}
