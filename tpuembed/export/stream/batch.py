"""The unit of work of a worker: shards that are adjacent in one file, and the place to write them.

The process that assigns batches has a `Place`. A worker gets the place's description of a batch, in JSON values, made
when the batch is assigned. In a folder a batch is one shard. In a store it is one part of an upload.
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
"""Target of a batch in JSON values: `{"folder": path}`, or the fields of
`tpuembed.export.publish.store.part.PartUpload`.
"""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Shards that one worker writes in sequence."""

    shards: tuple[ShardTask, ...]

    @property
    def index(self) -> int:
        """Return the index of its first shard, which is unique among batches."""
        return self.shards[0].index

    def __str__(self) -> str:
        """Return the name of the batch in error messages."""
        if len(self.shards) == 1:
            return str(self.shards[0])
        first, last = self.shards[0], self.shards[-1]
        return f"shards {first.index} to {last.index} (tables {first.table!r} to {last.table!r})"


class Place(Protocol):
    """The place of the data files, as the process that assigns batches knows it."""

    def batches(self, tasks: Sequence[ShardTask]) -> list[Batch]:
        """Group `tasks` into batches, in their order."""
        ...

    def where(self, batch: Batch) -> Where:
        """Return the target of a batch for its worker. Call it when the batch is assigned, because signed URLs expire."""
        ...

    @property
    def hint(self) -> str:
        """Return advice for a worker that does not find the place; empty if none is needed."""
        ...


@dataclasses.dataclass(frozen=True)
class FolderPlace:
    """A folder of data files, each already of its full size."""

    folder: Path

    def batches(self, tasks: Sequence[ShardTask]) -> list[Batch]:
        """See Place."""
        return [Batch((task,)) for task in tasks]

    def where(self, batch: Batch) -> Where:  # noqa: ARG002 - the signature of Place
        """See Place."""
        return {"folder": str(self.folder)}

    @property
    def hint(self) -> str:
        """See Place."""
        return f"Every node of the cluster must see {self.folder.parent.parent} under this path."


def run_batch(
    shards: Sequence[ShardTask],
    where: Where,
    source: Source,
    on_chunk: Callable[[int], None] = ignore,
    checkpoint: "Checkpoint | None" = None,
) -> list[ShardResult]:
    """Write `shards`. Every engine runs this function, in a process that imports no TensorFlow.

    `on_chunk` is called regularly with the bytes written so far. For `checkpoint` and the errors see `run_shard`.
    """
    if "folder" not in where:
        from tpuembed.export.publish.store.part import PartUpload, run_part

        return run_part(shards, PartUpload(**where), source, on_chunk, checkpoint)
    return [run_shard(shard, source, Path(where["folder"]), on_chunk, checkpoint) for shard in shards]


def flush_batch(shards: Sequence[ShardTask], where: Where) -> None:
    """fsync the files of this batch on this machine. Another machine can only flush its own cache."""
    for file in {shard.file for shard in shards} if "folder" in where else ():
        flush_data(Path(where["folder"], file))
