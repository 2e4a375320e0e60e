"""The interface of an engine, which runs shard tasks somewhere and returns their results."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.stream.batch import Place
from tpuembed.export.stream.shard import ShardResult, Source, ignore

__all__ = ["Engine", "Job", "StartsEarly"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The data that all tasks of one export share.

    Attributes:
        source: the checkpoint.
        place: the place of the data files.
    """

    source: Source
    place: Place


class Engine(Protocol):
    """Runs `tpuembed.export.stream.batch.run_batch` for every batch, in any order, on any machine that sees the job's
    files.

    An engine may repeat a task that failed or was lost: it writes the same bytes to the same place.
    """

    def run(
        self,
        tasks: Sequence[ShardTask],
        job: Job,
        *,
        on_result: Callable[[ShardResult], None] = ignore,
        on_progress: Callable[[int], None] = ignore,
    ) -> list[ShardResult]:
        """Run all `tasks` and return their results in the order of their index.

        `on_result` is called with every result as soon as it arrives, and `on_progress` with the bytes that all tasks
        have written so far. Both are called in the caller's thread.

        Raises:
            TpuEmbedError: the error of the first task that failed; the others are stopped.
            WorkerError: a process that ran a task died repeatedly.
        """
        ...


@runtime_checkable
class StartsEarly(Protocol):
    """An engine whose processes can start before their tasks are known. Starting takes a good part of a second."""

    def starting(self, source: Source, tasks: int) -> AbstractContextManager[None]:
        """Start processes for a run of at most `tasks` tasks of `source`. Those that no run uses end with the context."""
        ...
