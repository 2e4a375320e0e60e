"""What an engine is: something that runs shard tasks somewhere and hands back their results."""

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
    """What all tasks of one export share.

    Attributes:
        source: the checkpoint.
        place: where the data files lie.
    """

    source: Source
    place: Place


class Engine(Protocol):
    """Runs `tpuembed.export.stream.batch.run_batch` for every batch of tasks, in any order and on any machine that sees the job.

    It may run a task again that failed or got lost: the same bytes are written to the same place.
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

        `on_result` gets every result as soon as it is there, `on_progress` the bytes written so far by all tasks; both
        are called in the caller's thread.

        Raises:
            TpuEmbedError: what the first task that failed raised; the others are stopped.
            WorkerError: a process that ran a task died, again and again.
        """
        ...


@runtime_checkable
class StartsEarly(Protocol):
    """An engine whose processes can be started before it is known what they will do, which takes a good part of a second."""

    def starting(self, source: Source, tasks: int) -> AbstractContextManager[None]:
        """Start them for a run of at most so many tasks of `source`; those that no run has taken end with the context."""
        ...
