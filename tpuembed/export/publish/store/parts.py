"""Parts of an upload: how shards are grouped into parts, and how a worker writes one.

A store limits the size of a part, and the number of parts. Source of the limits: Amazon S3's user guide, "Amazon S3
multipart upload limits".

A worker writes the shards of a part to a temporary file, and uploads it to a signed URL. The request carries the part's
MD5, so the store refuses a part that was damaged on the way. The MD5 is complete only after all bytes are known, so
they are kept in a file. A part can be sent again without reading the checkpoint again.
"""

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ExportError
from tpuembed.export.plan.plan import ExportPlan, ShardTask, format_bytes
from tpuembed.export.stream.shard import Batch, ShardResult, Source, Target, ignore, write_shard
from tpuembed.files.bucket import content_md5, md5
from tpuembed.files.put import put_file

if TYPE_CHECKING:
    from tpuembed.checkpoint import Checkpoint

__all__ = ["MAX_OBJECT_BYTES", "check_sizes", "parts_of", "run_part"]

MIN_PART_BYTES: Final = 5 << 20
"""The least size of every part except an upload's last."""
MAX_PARTS: Final = 10_000
MAX_OBJECT_BYTES: Final = 5 << 40


def check_sizes(plan: ExportPlan) -> None:
    """Raise ExportError if a data file is larger than an object can be."""
    for stack in plan.stacks:
        if stack.size > MAX_OBJECT_BYTES:
            raise ExportError(
                f"stack {stack.name!r} has {format_bytes(stack.size)}, but an object can have "
                f"{format_bytes(MAX_OBJECT_BYTES)} at most. Export its tables apart with --table, store "
                "them as int8, or export to a disk."
            )


def parts_of(plan: ExportPlan) -> Mapping[str, list[Batch]]:
    """Return the parts of every data file, in order. A part has the fewest adjacent shards that make a size the store
    accepts.
    """
    sizes, parts = {stack.file: stack.size for stack in plan.stacks}, dict[str, list[Batch]]()
    for file, tasks in groupby(plan.shards, key=attrgetter("file")):
        least, group, size = max(MIN_PART_BYTES, -(-sizes[file] // MAX_PARTS)), list[ShardTask](), 0
        parts[file] = []
        for task in tasks:
            group.append(task)
            size += task.size
            if size >= least:
                parts[file].append(Batch(tuple(group)))
                group, size = [], 0
        if group:
            parts[file].append(Batch(tuple(group)))
    return parts


def run_part(
    shards: Sequence[ShardTask],
    target: Target,
    source: Source,
    on_chunk: Callable[[int], None] = ignore,
    checkpoint: "Checkpoint | None" = None,
) -> list[ShardResult]:
    """Upload the rows of `shards`, which are adjacent in one data file, as one part. See `run_shard`."""
    done, results = 0, list[ShardResult]()
    with _PartFile(shards[0].file_offset, target.shown) as part:
        for shard in shards:

            def count(written: int, before: int = done) -> None:
                on_chunk(before + written)

            results.append(write_shard(shard, source, part.write, count, checkpoint))
            done += shard.size
        tag = part.send(target.place, lambda: on_chunk(done))
    return [dataclasses.replace(result, tag=tag) for result in results]


class _PartFile:
    """The bytes of a part, written in order."""

    def __init__(self, offset: int, shown: str) -> None:
        self._offset, self._shown = offset, shown
        self._size, self._digest = 0, md5()
        try:
            self._file = tempfile.TemporaryFile(prefix="tpuembed-part-", buffering=0)  # noqa: SIM115 - closed in __exit__
        except OSError as error:
            raise self._failed(error) from None

    def __enter__(self) -> "_PartFile":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def write(self, data: npt.NDArray[np.uint8], offset: int) -> None:
        """Write all of `data` after the bytes that were written before."""
        if offset != self._offset + self._size:
            raise ExportError(f"{self._shown}: got bytes at {offset}, expected bytes at {self._offset + self._size}.")
        self._digest.update(data)
        rest = data.data
        try:
            while rest:
                rest = rest[os.write(self._file.fileno(), rest) :]
        except OSError as error:
            raise self._failed(error) from None
        self._size += len(data)

    def send(self, url: str, on_block: Callable[[], None]) -> str:
        """Upload the part and return its ETag."""
        headers = {"Content-MD5": content_md5(self._digest.digest())}
        try:
            return put_file(url, self._file, self._size, headers, on_block)
        except TimeoutError as error:
            raise ExportError(f"{self._shown}: cannot be uploaded: {error.strerror}.") from error
        except OSError as error:
            raise ExportError(f"{self._shown}: cannot be uploaded: {error.strerror or error}.") from None

    def _failed(self, error: OSError) -> ExportError:
        place: Any = tempfile.gettempdir()
        return ExportError(
            f"{self._shown}: its temporary file in {place} cannot be written: {error.strerror}. Free space, or "
            "name another folder in TMPDIR."
        )
