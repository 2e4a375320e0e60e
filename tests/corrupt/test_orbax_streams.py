"""Damaged chunks that are decoded as streams: refused where TensorStore refuses the whole chunk, whichever rows are read."""

import random
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import tensorstore

from tests.support.checkpoint.orbax_fuzzer import bytes_changed
from tests.support.checkpoint.orbax_trees import Array, write_shards, write_tree
from tests.support.messages import refused
from tpuembed.checkpoint import open_checkpoint
from tpuembed.checkpoint.orbax import arrays, chunk_streams
from tpuembed.errors import CheckpointCorruptError

pytestmark = pytest.mark.nightly

zstandard = pytest.importorskip("zstandard", reason="needs zstandard, of the extra [jax]")

ROWS = np.random.default_rng(0).normal(size=(9_000, 16)).astype(np.float32)
ROWS[3_000:5_000] = 0
"""More than four blocks."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of any size are streamed."""
    monkeypatch.setattr(chunk_streams, "_STREAMED_FROM_BYTES", 0)
    monkeypatch.setattr(arrays, "_ALONE_FROM_BYTES", 0)


@pytest.fixture
def chunk(tmp_path: Path) -> Path:
    """The file of the only chunk."""
    return write_tree(tmp_path / "ckpt", {("t",): ROWS}, ocdbt=False) / "t" / "0.0"


def read(chunk: Path, start: int = 0, stop: int | None = None) -> Array:
    with open_checkpoint(chunk.parents[1]) as checkpoint:
        return checkpoint.read("t", start, stop)


def refusal(chunk: Path) -> str:
    """The message, which is the same whether all rows are asked for, or the first one."""
    messages = set()
    for stop in (None, 1):
        with pytest.raises(CheckpointCorruptError) as caught:
            read(chunk, 0, stop)
        messages.add(str(caught.value))
    (message,) = messages
    assert "\n" not in message
    assert f"checkpoint {chunk.parents[1]}: array 't': " in message
    assert "chunk '0.0'" in message
    return message


def frame(data: bytes, **how: bool) -> bytes:
    return zstandard.ZstdCompressor(level=1, **how).compress(data)


def test_cut_anywhere(chunk: Path) -> None:
    whole = chunk.read_bytes()
    sizes = [*range(40), *range(len(whole) - 40, len(whole)), *range(0, len(whole), 9973)]
    for size in sizes:
        chunk.write_bytes(whole[:size])
        refusal(chunk)


@pytest.mark.parametrize("tail", [b"\0", b"\0" * 3, b"x" * 20, b"x" * 4_000, b"x" * 1_000_000], ids=len)
def test_bytes_after_the_end(tail: bytes, chunk: Path) -> None:
    chunk.write_bytes(chunk.read_bytes() + tail)
    message = refusal(chunk)
    assert f"continues for {len(tail)} bytes after its end" in message or "more bytes than" in message


@pytest.mark.parametrize("frames", [(0, 0), (0, 1), (1, 0)])
def test_more_than_one_frame(frames: tuple[int, int], chunk: Path) -> None:
    """One of them to be skipped, or a half of the rows in each."""
    skippable = struct.pack("<II", 0x184D2A50, 5) + b"12345"
    half = ROWS.nbytes // 2
    both = frame(ROWS.tobytes()[:half]) + frame(ROWS.tobytes()[half:])
    chunk.write_bytes({(0, 0): both, (0, 1): frame(ROWS.tobytes()) + skippable, (1, 0): skippable + frame(b"")}[frames])
    refusal(chunk)


@pytest.mark.parametrize("size", [0, 1, 64, ROWS.nbytes - 64, ROWS.nbytes - 1, ROWS.nbytes + 1, 2 * ROWS.nbytes])
@pytest.mark.parametrize("says_size", [False, True])
def test_frames_of_another_size(size: int, says_size: bool, chunk: Path) -> None:
    data = (ROWS.tobytes() * 2)[:size]
    chunk.write_bytes(frame(data, write_content_size=says_size))
    assert re.search("should decode to|decodes to|ends after|has more bytes than", refusal(chunk))


def test_frames_that_do_not_say_their_size(chunk: Path) -> None:
    chunk.write_bytes(frame(ROWS.tobytes(), write_content_size=False))
    np.testing.assert_array_equal(read(chunk), ROWS)
    np.testing.assert_array_equal(read(chunk, 5, 9), ROWS[5:9])


def test_frames_with_a_checksum(chunk: Path) -> None:
    """What is changed anywhere after the header is noticed before the first row is handed out."""
    whole = frame(ROWS.tobytes(), write_checksum=True)
    chunk.write_bytes(whole)
    np.testing.assert_array_equal(read(chunk), ROWS)
    np.testing.assert_array_equal(read(chunk, 5, 9), ROWS[5:9])
    rng = random.Random(0)
    for place in [*range(len(whole) - 8, len(whole)), *(rng.randrange(20, len(whole)) for _ in range(50))]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        chunk.write_bytes(damaged)
        refusal(chunk)


def test_a_frame_that_swells(chunk: Path) -> None:
    """32 KB that decode to 1 GiB, and say nothing of it, where half a megabyte should be."""
    chunk.write_bytes(frame(bytes(1 << 30), write_content_size=False))
    script = """
import resource, sys
from tpuembed.checkpoint import open_checkpoint
from tpuembed.checkpoint.orbax import chunk_streams
from tpuembed.errors import CheckpointCorruptError
chunk_streams._STREAMED_FROM_BYTES = 0
with open_checkpoint(sys.argv[1]) as checkpoint:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        checkpoint.read("t", 0, 1)
    except CheckpointCorruptError:
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", script, str(chunk.parents[1])], check=True)


def test_plain_chunks_of_another_size(tmp_path: Path) -> None:
    chunk = write_tree(tmp_path / "ckpt", {("t",): ROWS}, ocdbt=False, compressed=False) / "t" / "0.0"
    whole = chunk.read_bytes()
    for data in (b"", whole[:-1], whole + b"\0", whole * 2):
        chunk.write_bytes(data)
        refusal(chunk)


def mend(index: bytes) -> bytes:
    return index + struct.pack("<I", google_crc32c.value(index))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d[:30],
        lambda d: d[:-1] + bytes([d[-1] ^ 1]),
        lambda d: d[:-60] + bytes([d[-60] ^ 1]) + d[-59:],
        lambda d: d[:-68] + mend(struct.pack("<QQ", 0, 1 << 40) + d[-52:-4]),
        lambda d: d[:-68] + mend(struct.pack("<QQ", (1 << 64) - 1, 5) + d[-52:-4]),
        lambda d: d[:-68] + mend(struct.pack("<QQ", 1, 5_000) + d[-52:-4]),
    ],
)
def test_damaged_shards(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = write_shards(tmp_path / "ckpt", ROWS, (2_250, 8), (4_500, 16))
    with open_checkpoint(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("t"), ROWS)
    shard = path / "t" / "c" / "0" / "0"
    shard.write_bytes(change(shard.read_bytes()))
    with open_checkpoint(path) as checkpoint, refused(CheckpointCorruptError):
        checkpoint.read("t", 0, 1)


def flips(rng: random.Random, whole: bytes) -> Iterator[bytes]:
    """One bit of the header, of a block's header, of anything; and whatever the fuzzer does."""
    at, blocks = zstandard.frame_header_size(whole), []
    while at < len(whole):
        header = int.from_bytes(whole[at : at + 3], "little")
        blocks.append(at)
        at += 3 + (1 if header >> 1 & 3 == 1 else header >> 3)
    while True:
        near = rng.choice([0, *blocks]) + rng.choice([0, 3])
        for place in (near + rng.randrange(30), rng.randrange(len(whole))):
            damaged = bytearray(whole)
            damaged[min(place, len(whole) - 1)] ^= 1 << rng.randrange(8)
            yield bytes(damaged)
        yield bytes_changed(rng, whole)


def compare(chunk: Path, seed: int, executions: int) -> tuple[int, int]:
    """How many damaged chunks TensorStore read, and how many it refused; it is the truth about each."""
    rng = random.Random(seed)
    whole = chunk.read_bytes()
    array = tensorstore.open({"driver": "zarr", "kvstore": f"file://{chunk.parent}/"}, open=True).result()
    outcomes = [0, 0]
    for number, damaged in zip(range(executions), flips(rng, whole), strict=False):
        chunk.write_bytes(damaged)
        start = rng.randrange(len(ROWS))
        stop = rng.choice([start + 1, len(ROWS)])
        try:
            expected = array.read().result()
        except ValueError:
            expected = None
        try:
            found = read(chunk, start, stop)
        except CheckpointCorruptError:
            assert expected is None, f"{number}: refused"
        else:
            assert expected is not None, f"{number}: read rows [{start}, {stop}) of a chunk that TensorStore refuses"
            np.testing.assert_array_equal(found.view(np.int32), expected[start:stop].view(np.int32), str(number))
        outcomes[expected is None] += 1
    return outcomes[0], outcomes[1]


def test_whatever_tensorstore_says(chunk: Path) -> None:
    accepted, refusals = compare(chunk, 0, 300)
    assert accepted > 20
    assert refusals > 100


@pytest.mark.timeout(3000)
def test_whatever_tensorstore_says_of_many(chunk: Path) -> None:
    assert sum(compare(chunk, 1, 20_000)) == 20_000
