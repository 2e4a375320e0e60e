"""The worker's step of an export to a store: write shards to a temporary file, and upload it as one part to a signed
URL.

The request carries the part's MD5, so the store refuses a part that was damaged on the way. The MD5 is complete only
after all bytes are known, so they are kept in a file. A part can be sent again without reading the checkpoint again.
"""

import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ExportError
from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.stream.shard import ShardResult, Source, ignore, write_shard
from tpuembed.files.bucket import content_md5, md5
from tpuembed.files.put import put_file

if TYPE_CHECKING:
    from tpuembed.checkpoint import Checkpoint

__all__ = ["PartUpload", "run_part"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartUpload:
    """The target of a part, in JSON values.

    Attributes:
        url: the URL to PUT the part to.
        shown: the name of the part in messages, because the URL is a secret.
    """

    url: str
    shown: str


def run_part(
    shards: Sequence[ShardTask],
    upload: PartUpload,
    source: Source,
    on_chunk: Callable[[int], None] = ignore,
    checkpoint: "Checkpoint | None" = None,
) -> list[ShardResult]:
    """Upload the rows of `shards`, which are adjacent in one data file, as one part. See `run_shard`."""
    done, results = 0, list[ShardResult]()
    with _PartFile(shards[0].file_offset, upload.shown) as part:
        for shard in shards:
            results.append(write_shard(shard, source, part, functools.partial(_count, on_chunk, done), checkpoint))
            done += shard.size
        tag = part.send(upload.url, lambda: on_chunk(done))
    return [dataclasses.replace(result, tag=tag) for result in results]


def _count(on_chunk: Callable[[int], None], before: int, written: int) -> None:
    on_chunk(before + written)


class _PartFile:
    """The bytes of a part, written in order; a DataFile."""

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

    def checksum(self, task: ShardTask, on_chunk: Callable[[int], None]) -> int:  # noqa: ARG002 - the signature of DataFile
        """Return 0: shards of a finished part are never given to a worker."""
        return 0

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
