"""The data files of a bundle, opened on first use and read by byte range from any number of threads."""

import threading
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from tpuembed.errors import CheckpointCorruptError, CheckpointError, reason
from tpuembed.files import ByteFile, FilePath, FileVersion, open_bytes, read_all, versions
from tpuembed.formats.tensor_bundle.entries import Slice
from tpuembed.formats.tensor_bundle.index import shard_path

__all__ = ["DataFiles"]

Array = np.ndarray[Any, Any]


class DataFiles:
    """Data files 0 to `num_shards` - 1 of the bundle `prefix`."""

    def __init__(self, prefix: FilePath, num_shards: int) -> None:
        self._prefix = prefix
        self._num_shards = num_shards
        self._files: dict[int, ByteFile] = {}
        self._checked: dict[int, FileVersion] = {}
        self._lock = threading.Lock()
        self._closed = False

    def path(self, shard: int) -> FilePath:
        """Return the path of data file `shard`."""
        return shard_path(self._prefix, shard, self._num_shards)

    def check_ranges(self, parts: Iterable[tuple[str, Slice]]) -> None:
        """Raise CheckpointCorruptError unless every named part is inside its data file and overlaps no other part."""
        ordered = sorted(parts, key=lambda item: (item[1].shard, item[1].offset, item[1].size))
        found = self._checked = self.versions(part.shard for _, part in ordered)
        ends: dict[int, int] = {}
        for name, part in ordered:
            path, size, end = self.path(part.shard), found[part.shard].size, part.offset + part.size
            if end > size:
                raise CheckpointCorruptError.of(
                    f"data file {path}: has {size} bytes, but the index puts tensor {name!r} at bytes [{part.offset}, "
                    f"{end}). It is truncated"
                )
            if part.size and part.offset < ends.get(part.shard, 0):
                raise CheckpointCorruptError(
                    f"data file {path}: the index puts tensor {name!r} at byte {part.offset}, inside the previous "
                    f"tensor, which ends at {ends[part.shard]}. Restore the index from another copy."
                )
            ends[part.shard] = max(end, ends.get(part.shard, 0))

    def versions(self, shards: Iterable[int]) -> dict[int, FileVersion]:
        """Return sizes and modification times of the data files `shards`, by number."""
        numbers = sorted(set(shards))
        try:
            return dict(zip(numbers, versions([self.path(shard) for shard in numbers]), strict=True))
        except FileNotFoundError as error:
            raise CheckpointCorruptError(
                f"data file {error.filename}: is missing, but the index puts tensors in it. Copy it here."
            ) from None
        except OSError as error:
            _fail(error)

    def read_into(self, shard: int, offset: int, out: Array) -> None:
        """Fill the C-contiguous `out` with the bytes at `offset`, without an intermediate copy."""
        self.read_ranges([(shard, offset, out)])

    def read_ranges(self, ranges: Iterable[tuple[int, int, Array]]) -> None:
        """Fill every C-contiguous array with the bytes of its data file at its offset, in parallel from a store."""
        self.read_views((shard, [(offset, _bytes_of(out))]) for shard, offset, out in ranges if out.size)

    def read_views(self, ranges: Iterable[tuple[int, Iterable[tuple[int, memoryview]]]]) -> None:
        """Fill the buffers, given with their offsets for each data file."""
        try:
            read_all((self._file(shard), in_file) for shard, in_file in ranges)
        except OSError as error:
            _fail(error)
        except EOFError as error:
            raise CheckpointCorruptError(
                f"data file {error}. It was truncated after it was opened. Read it when no program writes to it."
            ) from None

    def _file(self, shard: int) -> ByteFile:
        file = self._files.get(shard)
        return file if file is not None else self._open(shard)

    def _open(self, shard: int) -> ByteFile:
        with self._lock:
            if self._closed:
                raise CheckpointError(f"bundle {self._prefix}: is closed. Open it again.")
            if shard not in self._files:
                file = open_bytes(self.path(shard))
                if file.version != self._checked.get(shard, file.version):
                    file.close()
                    raise CheckpointError(
                        f"data file {self.path(shard)}: has changed since the checkpoint was opened, so it may not "
                        "match the index. Open the checkpoint again."
                    )
                self._files[shard] = file
            return self._files[shard]

    def close(self) -> None:
        """Close the open data files."""
        with self._lock:
            self._closed = True
            while self._files:
                self._files.popitem()[1].close()


def _bytes_of(out: Array) -> memoryview:
    return out.reshape(-1).view(np.uint8).data


def _fail(error: OSError) -> NoReturn:
    raise CheckpointError(f"data file {error.filename}: cannot be read: {reason(error)}.") from None
