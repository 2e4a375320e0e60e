"""What a worker does at a time: shards whose bytes lie side by side in one file, and where it writes them.

The process that gives batches out has a `Place`; a worker has what the place says of a batch, in JSON values, made when the
batch is given out. In a folder a batch is one shard; in a store it is one part of an upload.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.stream.resume_log import flush_data
from tpuembed.export.stream.shard import ShardResult, Source, ignore, run_shard

if TYPE_CHECKING:
    from tpuembed.checkpoint import Checkpoint

__all__ = ["Batch", "FolderPlace", "Place", "Where", "flush_batch", "run_batch"]

Where = Mapping[str, Any]
"""Of a batch, in JSON values: `{"folder": path}`, or the fields of a `tpuembed.export.publish.store.part.PartUpload`."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Shards that one worker writes, one after another."""

    shards: tuple[ShardTask, ...]

    @property
    def index(self) -> int:
        """Of its first shard: no other batch has it."""
        return self.shards[0].index

    def __str__(self) -> str:
        """As error messages name it."""
        if len(self.shards) == 1:
            return str(self.shards[0])
        first, last = self.shards[0], self.shards[-1]
        return f"shards {first.index} to {last.index} (tables {first.table!r} to {last.table!r})"


class Place(Protocol):
    """Where data files lie, as the process knows it that gives batches out."""

    def batches(self, tasks: Sequence[ShardTask]) -> list[Batch]:
        """All `tasks`, each in one batch, in their order."""
        ...

    def where(self, batch: Batch) -> Where:
        """What a worker is told. Asked for when the batch is given out: a signed URL is good for a while only."""
        ...

    @property
    def hint(self) -> str:
        """What to look at where a worker does not find the place; empty where it needs none."""
        ...


@dataclasses.dataclass(frozen=True)
class FolderPlace:
    """A folder with data files, each of its full size already."""

    folder: Path

    def batches(self, tasks: Sequence[ShardTask]) -> list[Batch]:
        """See Place."""
        return [Batch((task,)) for task in tasks]

    def where(self, batch: Batch) -> Where:  # noqa: ARG002 - as Place
        """See Place."""
        return {"folder": str(self.folder)}

    @property
    def hint(self) -> str:
        """See Place."""
        return f"every node of the cluster must see {self.folder.parent.parent} under this path"


def run_batch(
    shards: Sequence[ShardTask],
    where: Where,
    source: Source,
    on_chunk: Callable[[int], None] = ignore,
    checkpoint: "Checkpoint | None" = None,
) -> list[ShardResult]:
    """Write `shards`; the function that every engine runs, in a process that imports no TensorFlow.

    `on_chunk` is called now and then with the bytes written so far. For `checkpoint` and the errors see `run_shard`.
    """
    if "folder" not in where:
        from tpuembed.export.publish.store.part import PartUpload, run_part

        return run_part(shards, PartUpload(**where), source, on_chunk, checkpoint)
    return [run_shard(shard, source, Path(where["folder"]), on_chunk, checkpoint) for shard in shards]


def flush_batch(shards: Sequence[ShardTask], where: Where) -> None:
    """Have this machine's disk hold what it wrote: what another machine flushes is what it has itself."""
    for file in {shard.file for shard in shards} if "folder" in where else ():
        flush_data(Path(where["folder"], file))
