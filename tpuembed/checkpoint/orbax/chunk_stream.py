"""Decodes a stored chunk from its beginning on, one piece at a time.

The need: TensorStore decodes whole chunks. A chunk is what a device held, often gigabytes, and the rows of a stacked
table are in all of them. Here 128 MiB are enough to export it.

A frame of zstd is fed to the decoder block by block. No block, even of a damaged or malicious file, decodes to more
than 128 KiB (RFC 8878, 3.1.1.2.3). So memory is a window, a piece of the stored bytes, and a block.
"""

from typing import Any, Final

from tpuembed.checkpoint.orbax.stored_values import StoredValue

__all__ = ["ChunkStream", "is_available", "open_stream", "stream_bytes"]

_PIECE_BYTES: Final = 256 << 10
"""Bytes of a stored chunk to read at a time."""
_PLAIN_BYTES: Final = 1 << 20
"""The same for a chunk that is not compressed."""
_BLOCK_BYTES: Final = 128 << 10
_DECODED_BYTES: Final = 1 << 20
"""Bytes to decode at a time: a few stored bytes may decode to many."""
_WINDOW_BYTES: Final = 8 << 20
"""A frame that needs a larger window is decoded by TensorStore. Orbax's level 1 uses 512 KiB, its level 3 uses 2 MiB."""
_DECODER_BYTES: Final = 512 << 10
"""Memory of a decoder beside its window."""
_HEADER_BYTES: Final = 18
_BLOCK_HEADER_BYTES: Final = 3
_CHECKSUM_BYTES: Final = 4
_RLE: Final = 1
"""The type of a block that is one byte, repeated."""
_UNKNOWN: Final = (1 << 64) - 1
"""The content size in a frame that does not record it."""


class ChunkStream:
    """The decoded bytes of a chunk, in order. Here the chunk is not compressed.

    Attributes:
        position: of the next byte.
        value: the stored bytes.
        cost: bytes of memory that it holds.
    """

    def __init__(self, value: StoredValue, size: int, cost: int = 0) -> None:
        self.value, self.position, self.cost, self._size = value, 0, cost, size

    def fill(self, out: memoryview) -> None:
        """Fill `out` with the next bytes. Raises CheckpointCorruptError if they cannot be decoded."""
        for done in range(0, len(out), _PLAIN_BYTES):
            part = out[done : done + _PLAIN_BYTES]
            part[:] = self.value.read(self.position, self.position + len(part))
            self.position += len(part)

    def skip(self, size: int) -> None:
        """Drop the next `size` bytes. Raises as `fill`."""
        self.position += size

    def finish(self) -> None:
        """Decode to the end, and check its position. Raises as `fill`."""
        self.position = self._size


def is_available(level: int | None) -> bool:
    """Returns True if the decoder is installed."""
    return level is None or _zstandard() is not None


def stream_bytes(level: int | None, size: int) -> int:
    """Return the approximate memory of a stream of a chunk of `size` bytes.

    Source: ZSTD_defaultCParameters (zstd, lib/compress/clevels.h).
    """
    if level is None:
        return 0
    log = 18 + max(level, 1) if level <= 3 else 22 if level <= 15 else 23
    return min(size, 1 << (21 if level == 0 else log)) + _PIECE_BYTES + _BLOCK_BYTES + _DECODER_BYTES


def open_stream(value: StoredValue, size: int, level: int | None) -> ChunkStream | None:
    """Open the chunk of `size` bytes that is stored as `value`. Returns None if it needs another decoder.

    Raises:
        CheckpointCorruptError: it has another size, or is not a frame of zstd.
    """
    if level is None:
        if value.size != size:
            value.fail(f"has {value.size} bytes, but should have {size}")
        return ChunkStream(value, size)
    zstandard = _zstandard()
    head = value.read(0, min(value.size, _HEADER_BYTES))
    try:
        frame, header_bytes = zstandard.get_frame_parameters(head), zstandard.frame_header_size(head)
    except zstandard.ZstdError as error:
        value.fail(f"is not a frame of zstd: {error}")
    if frame.dict_id or frame.window_size > _WINDOW_BYTES:
        return None
    if frame.content_size not in {size, _UNKNOWN}:
        value.fail(f"should decode to {size} bytes, but its header has {frame.content_size}")
    cost = frame.window_size + _PIECE_BYTES + _BLOCK_BYTES + _DECODER_BYTES
    return _ZstdStream(value, size, cost, head[:header_bytes], has_checksum=frame.has_checksum)


class _ZstdStream(ChunkStream):
    """A chunk that is one frame of zstd."""

    def __init__(self, value: StoredValue, size: int, cost: int, header: bytes, *, has_checksum: bool) -> None:
        super().__init__(value, size, cost)
        self._zstandard = _zstandard()
        self._decoder = self._zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()
        self._decoder.decompress(header)
        self._checksum_bytes = _CHECKSUM_BYTES if has_checksum else 0
        self._read = len(header)  # bytes read of the value
        self._stored = memoryview(b"")  # bytes that were read and not decoded yet
        self._decoded = memoryview(b"")  # bytes that were decoded and not requested yet
        self._produced = 0  # number of all decoded bytes
        self._is_over = False

    def fill(self, out: memoryview) -> None:
        done = 0
        while done < len(out):
            part = self._next(len(out) - done)
            out[done : done + len(part)] = part
            done += len(part)

    def skip(self, size: int) -> None:
        while size:
            size -= len(self._next(size))

    def finish(self) -> None:
        self.skip(self._size - self.position)
        while not self._is_over:
            self._decode(_BLOCK_BYTES)
        left = len(self._stored) + self.value.size - self._read
        if left:
            self.value.fail(f"continues for {left} bytes after its end")

    def _next(self, most: int) -> memoryview:
        """Return up to `most` bytes."""
        while not self._decoded:
            self._decode(most)
        part, self._decoded = self._decoded[:most], self._decoded[most:]
        self.position += len(part)
        return part

    def _decode(self, wanted: int) -> None:
        """Decode some blocks, of at most `wanted` bytes, or one, so that few decoded bytes are left over."""
        blocks, is_last = self._take(max(1, min(wanted, _DECODED_BYTES) // _BLOCK_BYTES))
        try:
            self._decoded = memoryview(self._decoder.decompress(blocks))
        except self._zstandard.ZstdError as error:
            self.value.fail(f"cannot be decoded: {error}")
        self._produced += len(self._decoded)
        if self._produced > self._size:
            self.value.fail(f"decodes to more than the {self._size} bytes that it should have")
        self._is_over = is_last
        if is_last != self._decoder.eof or (is_last and self._produced != self._size):
            self.value.fail(f"decodes to {self._produced} bytes, but should decode to {self._size}")

    def _take(self, count: int) -> tuple[memoryview, bool]:
        """Return the next `count` blocks, or as many as were read, and whether the last one is among them."""
        size, is_last = self._block(0)
        self._load(size)
        for _ in range(count - 1):
            if is_last or len(self._stored) < size + _BLOCK_HEADER_BYTES:
                break
            more, ends = self._block(size)
            if len(self._stored) < size + more:
                break
            size, is_last = size + more, ends
        blocks, self._stored = self._stored[:size], self._stored[size:]
        return blocks, is_last

    def _block(self, at: int) -> tuple[int, bool]:
        """Return the stored size of the block that begins `at`, with the checksum after the last one, and whether it is
        the last.
        """
        self._load(at + _BLOCK_HEADER_BYTES)
        header = int.from_bytes(self._stored[at : at + _BLOCK_HEADER_BYTES], "little")
        is_last, kind, size = header & 1, header >> 1 & 3, header >> 3
        if size > _BLOCK_BYTES:
            self.value.fail(f"has a block of {size} bytes, more than the format allows")
        return _BLOCK_HEADER_BYTES + (1 if kind == _RLE else size) + is_last * self._checksum_bytes, bool(is_last)

    def _load(self, size: int) -> None:
        """Read until `size` stored bytes are available."""
        if len(self._stored) >= size:
            return
        stop = min(self.value.size, self._read + _PIECE_BYTES)
        self._stored = memoryview(bytes(self._stored) + self.value.read(self._read, stop))
        self._read = stop
        if len(self._stored) < size:
            self.value.fail(f"ends after {self.value.size} bytes, in the middle of a block")


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard
