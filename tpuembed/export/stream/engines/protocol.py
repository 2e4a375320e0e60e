"""The interface of an engine, which runs shard tasks somewhere and returns their results."""

import abc
import contextlib
from collections.abc import Callable, Sequence

from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.publish.version_writer import VersionWriter
from tpuembed.export.stream.shard import ShardResult, Source, ignore

__all__ = ["Engine"]


class Engine(abc.ABC):
    """Runs `tpuembed.export.stream.batch.run_batch` for every batch, in any order, on any machine that sees the source
    and the targets.

    An engine may repeat a batch that failed or was lost: it writes the same bytes to the same place.
    """

    @abc.abstractmethod
    def run(
        self,
        tasks: Sequence[ShardTask],
        source: Source,
        writer: VersionWriter,
        *,
        on_result: Callable[[ShardResult], None] = ignore,
        on_progress: Callable[[int], None] = ignore,
    ) -> list[ShardResult]:
        """Read all `tasks` from `source`, write them with `writer`, and return their results in the order of their
        index.

        `on_result` is called with every result as soon as it arrives, and `on_progress` with the bytes that all tasks
        have written so far. Both are called in the caller's thread.

        Raises:
            TpuEmbedError: the error of the first task that failed; the others are stopped.
            WorkerError: a process that ran a task died repeatedly.
        """

    def starting(self, source: Source, tasks: int) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002 - engines that start late
        """Start processes for a run of at most `tasks` tasks of `source`, before the tasks are known.

        Starting takes a good part of a second. Processes that no run uses end with the context.
        """
        return contextlib.nullcontext()
