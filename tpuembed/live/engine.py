"""Writes the shards in threads of this process, which holds the rows."""

import concurrent.futures
import threading
from collections.abc import Callable, Sequence

from tpuembed.checkpoint import Checkpoint
from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.publish.version_writer import VersionWriter
from tpuembed.export.stream.batch import run_batch
from tpuembed.export.stream.engines import Engine, default_workers
from tpuembed.export.stream.shard import Batch, ShardResult, Source, ignore

__all__ = ["ThreadEngine"]

_REPORT_SECONDS = 0.1


class ThreadEngine(Engine):
    """Reads from an open checkpoint, which any thread may read."""

    def __init__(self, checkpoint: Checkpoint, workers: int | None) -> None:
        """Write at most `workers` shards at once. None means one per processor."""
        self._checkpoint = checkpoint
        self._workers = default_workers() if workers is None else workers

    def run(
        self,
        tasks: Sequence[ShardTask],
        source: Source,
        writer: VersionWriter,
        *,
        on_result: Callable[[ShardResult], None] = ignore,
        on_progress: Callable[[int], None] = ignore,
    ) -> list[ShardResult]:
        """Write the shards, see Engine.run. All its threads have ended when it returns or raises."""
        running = _Run(self._checkpoint, source, writer)
        with concurrent.futures.ThreadPoolExecutor(self._workers) as pool:
            waiting = {pool.submit(running.write, batch) for batch in writer.batches(tasks)}
            try:
                results = list[ShardResult]()
                while waiting:
                    done, waiting = concurrent.futures.wait(
                        waiting, _REPORT_SECONDS, concurrent.futures.FIRST_COMPLETED
                    )
                    for result in (result for future in done for result in future.result()):
                        results.append(result)
                        on_result(result)
                    on_progress(running.written)
            except BaseException:
                running.stop()
                pool.shutdown(cancel_futures=True)
                raise
        return sorted(results, key=lambda result: result.index)


class _Stopped(Exception):  # noqa: N818 - not an error
    """Stops a thread because another shard failed."""


class _Run:
    """State that the threads of one run share."""

    def __init__(self, checkpoint: Checkpoint, source: Source, writer: VersionWriter) -> None:
        self._checkpoint, self._source, self._writer = checkpoint, source, writer
        self._stopped = threading.Event()
        self._written: dict[int, int] = {}

    @property
    def written(self) -> int:
        """Return the bytes that all batches have written so far."""
        return sum(self._written.copy().values())

    def stop(self) -> None:
        """Make every thread stop at its next chunk."""
        self._stopped.set()

    def write(self, batch: Batch) -> list[ShardResult]:
        """Write one batch."""

        def on_chunk(written: int) -> None:
            self._written[batch.index] = written
            if self._stopped.is_set():
                raise _Stopped

        return run_batch(batch.shards, self._writer.target(batch), self._source, on_chunk, self._checkpoint)
