"""Lists the content of HDF5 files with h5py, in a separate process of limited memory and processor time.

The need: a hostile file must not hang or crash a user's process, or take its memory, as the HDF5 library allows.

It opens no file: the parent process sends the bytes that it requests. Messages over a connection of multiprocessing:

    to it:   JSON: seconds of processor time, and the sizes of the files; then the bytes of every request
    from it: JSON: [file, offset, length], a request; or a listing of each file, followed by the places of chunks

Imports nothing of tpuembed, so that it starts quickly.
"""

import collections
import io
import json
import math
import resource
import struct
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, BinaryIO, Final

__all__: list[str] = []

_BLOCK_BYTES: Final = 1 << 16
_CACHED_BLOCKS: Final = 256
_MAX_MEMORY_BYTES: Final = 2 << 30
_MAX_OBJECTS: Final = 1_000_000
_MAX_CHUNKS: Final = 1 << 20
_VARS: Final = "vars"


class _RemoteFile(io.RawIOBase):
    """File number `number`, whose bytes the parent process sends."""

    def __init__(self, parent: Connection, number: int, size: int) -> None:
        self._parent, self._number, self._size, self._position = parent, number, size, 0
        self._blocks: collections.OrderedDict[int, bytes] = collections.OrderedDict()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view) and 0 <= self._position < self._size:
            block, start = divmod(self._position, _BLOCK_BYTES)
            piece = self._block(block)[start : start + len(view) - done]
            view[done : done + len(piece)] = piece
            done, self._position = done + len(piece), self._position + len(piece)
        return done

    def _block(self, block: int) -> bytes:
        if block not in self._blocks:
            offset = block * _BLOCK_BYTES
            length = min(_BLOCK_BYTES, self._size - offset)
            self._parent.send_bytes(json.dumps([self._number, offset, length]).encode())
            self._blocks[block] = self._parent.recv_bytes()
            if len(self._blocks) > _CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        return self._blocks[block]


class Lister:
    """The content of one file.

    Attributes:
        groups: path -> attribute `name`, for Keras' groups of variables.
        datasets: description and place of each.
        headers: (offset, size) of the objects' own descriptions, if they are in one piece.
        chunks: the places of the chunks of all datasets, (offset, size), in row-major order of their grids.
        trouble: the reason why the file cannot be read, or None.
    """

    def __init__(self, file: BinaryIO | io.RawIOBase) -> None:
        self.groups: dict[str, str | None] = {}
        self.datasets: list[dict[str, Any]] = []
        self.headers: list[tuple[int, int]] = []
        self.chunks: list[tuple[int, int]] = []
        self.trouble: str | None = None
        self._seen: set[int] = set()
        import h5py

        try:
            with h5py.File(file, "r") as opened:
                if opened.userblock_size:
                    raise ValueError(f"it has a user block of {opened.userblock_size} bytes, which is not supported")
                self._walk(h5py, opened)
        except MemoryError:
            self.trouble = "it claims more than fits in memory"
        except Exception as error:  # the library's error for bytes that it cannot parse
            self.trouble = " ".join(str(error).split())[:300] or type(error).__name__

    def to_json(self) -> dict[str, Any]:
        """Return everything except the chunks."""
        return {"groups": self.groups, "datasets": self.datasets, "headers": self.headers, "trouble": self.trouble}

    def _walk(self, h5py: Any, root: Any) -> None:
        pending = [("", root)]
        while pending:
            path, group = pending.pop()
            for name, child in self._children(h5py, path, group):
                if isinstance(child, h5py.Group):
                    pending.append((name, child))
                elif isinstance(child, h5py.Dataset):
                    self.datasets.append(self._dataset(h5py, name, child))

    def _children(self, h5py: Any, path: str, group: Any) -> Iterator[tuple[str, Any]]:
        self._visit(h5py, path, group)
        if path.rpartition("/")[2] == _VARS:
            self.groups[path] = _text(group, "name")
        for name in group:
            if len(self._seen) + len(self.datasets) > _MAX_OBJECTS:
                raise ValueError(f"it has more than {_MAX_OBJECTS} objects")
            child = f"{path}/{name}" if path else name
            link = group.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                raise ValueError(f"{child!r} is a {type(link).__name__}, which is not followed")
            yield child, group[name]

    def _visit(self, h5py: Any, path: str, thing: Any) -> None:
        info = h5py.h5o.get_info(thing.id)
        if info.addr in self._seen:
            raise ValueError(f"object {path!r} is listed twice, or is inside itself")
        self._seen.add(info.addr)
        if info.hdr.nchunks == 1:
            self.headers.append((info.addr, info.hdr.space.total))

    def _dataset(self, h5py: Any, path: str, dataset: Any) -> dict[str, Any]:
        self._visit(h5py, path, dataset)
        properties = dataset.id.get_create_plist()
        layouts = {h5py.h5d.COMPACT: "compact", h5py.h5d.CONTIGUOUS: "contiguous", h5py.h5d.CHUNKED: "chunked"}
        layout = "external" if properties.get_external_count() else layouts.get(properties.get_layout(), "virtual")
        found = {
            "path": path,
            "shape": dataset.shape,
            "dtype": _dtype(h5py, dataset),
            "stored_bytes": dataset.id.get_storage_size(),
            "stated_dtype": _text(dataset, "dtype"),
            "layout": layout,
            "offset": dataset.id.get_offset() if layout == "contiguous" else None,
        }
        return found | (self._chunked(path, dataset, properties) if layout == "chunked" else {})

    def _chunked(self, path: str, dataset: Any, properties: Any) -> dict[str, Any]:
        chunk = dataset.chunks
        grid = [-(-size // side) for size, side in zip(dataset.shape, chunk, strict=True)]
        count = math.prod(grid)
        if count + len(self.chunks) > _MAX_CHUNKS:
            raise ValueError(f"dataset {path!r} has {count} chunks, more than {_MAX_CHUNKS}")
        places = [(-1, -1)] * count

        def place(info: Any) -> None:
            index = 0
            for start, side, sides in zip(info.chunk_offset, chunk, grid, strict=True):
                if not 0 <= start // side < sides or start % side:
                    raise ValueError(f"dataset {path!r} has a chunk at {info.chunk_offset}")
                index = index * sides + start // side
            if places[index] != (-1, -1):
                raise ValueError(f"dataset {path!r} has two chunks at {info.chunk_offset}")
            if info.filter_mask:
                raise ValueError(f"dataset {path!r}: the chunk at {info.chunk_offset} skips a filter: not supported")
            places[index] = info.byte_offset, info.size

        dataset.id.chunk_iter(place)
        filters = [properties.get_filter(number) for number in range(properties.get_nfilters())]
        first, self.chunks = len(self.chunks), self.chunks + places
        return {
            "chunk": chunk,
            "filters": [[code, list(values)] for code, _, values, _ in filters],
            "first_chunk": first,
        }


def _dtype(h5py: Any, dataset: Any) -> str:
    """Return the dtype as numpy spells it, if the type in the file is exactly that one."""
    dtype, stored = dataset.dtype, dataset.id.get_type()
    if stored.get_class() == h5py.h5t.OPAQUE or stored.equal(h5py.h5t.py_create(dtype)):
        return str(dtype.str)
    return f"unusual {dtype.str}"


def _text(thing: Any, name: str) -> str | None:
    if name not in thing.attrs:
        return None
    value = thing.attrs[name]
    return value if isinstance(value, str) else None


def _main() -> None:
    parent = Connection(int(sys.argv[1]))
    seconds, sizes = json.loads(parent.recv_bytes())
    import h5py  # noqa: F401 - before the limit, which may be too low for the import itself

    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    listers = [Lister(_RemoteFile(parent, number, size)) for number, size in enumerate(sizes)]
    parent.send_bytes(json.dumps({"files": [lister.to_json() for lister in listers]}).encode())
    places = [number for lister in listers for place in lister.chunks for number in place]
    parent.send_bytes(struct.pack(f"<{len(places)}q", *places))


if __name__ == "__main__":
    _main()
