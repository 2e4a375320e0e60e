"""Exports without worker processes, for tests that are about something else: each process takes half a second to start."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence

import pytest

from tpuembed.export import run
from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.publish.version_writer import VersionWriter
from tpuembed.export.stream.batch import Failure, run_batch
from tpuembed.export.stream.engines import Engine, choose_engine
from tpuembed.export.stream.shard import ShardResult, Source, Target, ignore

__all__ = ["InProcessEngine", "exports_in_this_process"]


class InProcessEngine(Engine):
    """Runs every batch in the caller's thread. Sends targets as JSON and reports errors, as for a worker process."""

    def run(
        self,
        tasks: Sequence[ShardTask],
        source: Source,
        writer: VersionWriter,
        *,
        on_result: Callable[[ShardResult], None] = ignore,
        on_progress: Callable[[int], None] = ignore,
    ) -> list[ShardResult]:
        results = list[ShardResult]()
        for batch in writer.batches(tasks):
            target = Target(**json.loads(json.dumps(vars(writer.target(batch)))))
            try:
                found = run_batch(batch.shards, target, source)
            except Exception as error:
                raise Failure.of(error).error(batch) from error
            for result in found:
                results.append(result)
                on_result(result)
            on_progress(sum(result.bytes for result in results))
        return sorted(results, key=lambda result: result.index)


@contextlib.contextmanager
def exports_in_this_process() -> Iterator[None]:
    """Make exports with the engine `local` use `InProcessEngine`."""

    def choose(name: str, workers: int) -> Engine:
        chosen = choose_engine(name, workers)
        return InProcessEngine() if name == "local" else chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "choose_engine", choose)
        yield
