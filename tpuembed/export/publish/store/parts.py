"""Groups shards into parts to upload. A store limits the size of a part, and the number of parts.

Source of the limits: Amazon S3's user guide, "Amazon S3 multipart upload limits".
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final

from tpuembed.errors import ExportError
from tpuembed.export.formatting import format_bytes
from tpuembed.export.plan.plan import ExportPlan, ShardTask
from tpuembed.export.stream.batch import Batch

__all__ = ["MAX_OBJECT_BYTES", "StackPart", "check_sizes", "parts_of"]

MIN_PART_BYTES: Final = 5 << 20
"""The least size of every part except an upload's last."""
MAX_PARTS: Final = 10_000
MAX_PART_BYTES: Final = 5 << 30
MAX_OBJECT_BYTES: Final = 5 << 40


@dataclasses.dataclass(frozen=True)
class StackPart:
    """Part `number`, from 1 on, of the upload of the data file `file`."""

    file: str
    number: int
    batch: Batch

    @property
    def offset(self) -> int:
        """Return the offset of the part's first byte in the file."""
        return self.batch.shards[0].file_offset

    @property
    def size(self) -> int:
        """Return the bytes of the part."""
        return sum(shard.size for shard in self.batch.shards)


def check_sizes(plan: ExportPlan) -> None:
    """Raise ExportError if a data file is larger than an object can be."""
    for stack in plan.stacks:
        if stack.size > MAX_OBJECT_BYTES:
            raise ExportError(
                f"stack {stack.name!r} has {format_bytes(stack.size)}, but an object can have "
                f"{format_bytes(MAX_OBJECT_BYTES)} at most. Export its tables apart with --table or --rows, store "
                "them as int8, or export to a disk."
            )


def parts_of(plan: ExportPlan) -> Mapping[str, list[StackPart]]:
    """Return the parts of every data file, in order. A part has the fewest adjacent shards that make a size the store
    accepts.
    """
    sizes = {stack.file: stack.size for stack in plan.stacks}
    return {
        file: [
            StackPart(file, number, Batch(shards)) for number, shards in enumerate(_groups(list(tasks), sizes[file]), 1)
        ]
        for file, tasks in groupby(plan.shards, key=attrgetter("file"))
    }


def _groups(tasks: Sequence[ShardTask], size: int) -> Iterator[tuple[ShardTask, ...]]:
    least, group, bytes_of_group = max(MIN_PART_BYTES, -(-size // MAX_PARTS)), list[ShardTask](), 0
    for task in tasks:
        group.append(task)
        bytes_of_group += task.size
        if bytes_of_group >= least:
            yield tuple(group)
            group, bytes_of_group = [], 0
    if group:
        yield tuple(group)
