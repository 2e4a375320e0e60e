"""Damage at random to `checkpoint` files and to data files: nothing but a CheckpointError, and never a wrong answer."""

import collections
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoint.bundles import write
from tpuembed.checkpoint.location import find_bundle
from tpuembed.checkpoint.tools import verify_files
from tpuembed.errors import CheckpointError
from tpuembed.files import FilePath, as_path, remote
from tpuembed.tensor_bundle import index_path, shard_path

COUNT = 300

STATES = [
    b'model_checkpoint_path: "ckpt-1"\nall_model_checkpoint_paths: "ckpt-1"\n',
    b'model_checkpoint_path: "/old/place/ckpt-1"\n',
    b'model_checkpoint_path: "memory://fuzz/dir/ckpt-1"\n',
    b'model_checkpoint_path: "../dir/\\143kpt-1"\nlast_preserved_timestamp: 1.5\n',
]
TOKENS = [
    b"..",
    b"/",
    b"\\",
    b'"',
    b"\n",
    b"://",
    b"memory://fuzz/",
    b"s3://other/",
    b"\0",
    b"\xff",
    b"%2e",
    b"~",
    b"$HOME",
]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """`data` with some bytes changed, taken out, or put in."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(damaged) + 1)
        new = rng.choice([*TOKENS, rng.randbytes(1), b""])
        damaged[at : at + rng.randint(0, 3)] = new
    return bytes(damaged)


def outcome(call: Callable[[], object], named: FilePath, expected: Sequence[object]) -> str:
    """What `call` does: one of the results that it may have, or an error of one line that names a file."""
    try:
        result = call()
    except CheckpointError as error:
        kind, message = type(error).__name__, str(error)
    else:
        kind, message = "as it was", ""
        assert result in expected
    if message:
        assert "\n" not in message
        assert str(named) in message
    return kind


@pytest.mark.parametrize("place", ["disk", "store"])
def test_state_files(tmp_path: Path, place: str) -> None:
    """The checkpoint in the folder, a refusal, and, in a store, nothing outside of the bucket."""
    folder: FilePath = tmp_path / "dir"
    store: Callable[[bytes], object] = (tmp_path / "dir" / "checkpoint").write_bytes
    if place == "disk":
        (tmp_path / "dir").mkdir()
        (tmp_path / "dir" / "ckpt-1.index").write_bytes(b"")
    else:
        import obstore

        bucket = remote._store("memory", "fuzz")
        obstore.put(bucket, "dir/ckpt-1.index", b"")
        folder, store = as_path("memory://fuzz/dir"), lambda data: obstore.put(bucket, "dir/checkpoint", data)
    rng, outcomes = random.Random(0), collections.Counter[str]()
    for _ in range(COUNT):
        store(mutated(rng.choice(STATES), rng))
        outcomes[outcome(lambda: find_bundle(folder), folder, [folder / "ckpt-1", folder / "../dir/ckpt-1"])] += 1
    print(place, dict(outcomes))
    assert outcomes["as it was"] > COUNT / 10
    assert outcomes["CheckpointNotFoundError"] > COUNT / 20


def test_verify(tmp_path: Path) -> None:
    """Bytes of a data file changed at random, any number of them, the size kept: every tensor they lie in is named."""
    arrays: dict[str, Any] = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.arange(7, dtype=np.int8),
        "s": np.array([b"x" * 10, b""], object),
    }
    index = write(tmp_path / "ckpt", arrays)
    path = shard_path(tmp_path / "ckpt", 0, 1)
    whole, rng = path.read_bytes(), random.Random(0)
    for _ in range(COUNT):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 5])):
            damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        expected = {
            name
            for name, entry in index.entries.items()
            if damaged[entry.offset : entry.offset + entry.size] != whole[entry.offset : entry.offset + entry.size]
        }
        assert {damage.name for damage in verify_files(tmp_path / "ckpt").damaged} == expected


def test_verify_with_a_damaged_index(tmp_path: Path) -> None:
    """Refused, or verified as it was."""
    write(tmp_path / "ckpt", {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "s": np.array([b"x"], object)})
    path = index_path(tmp_path / "ckpt")
    whole, rng, outcomes = path.read_bytes(), random.Random(0), collections.Counter[str]()
    for _ in range(COUNT):
        path.write_bytes(mutated(whole, rng))
        outcomes[outcome(lambda: verify_files(tmp_path / "ckpt").damaged, path, [()])] += 1
    print(dict(outcomes))
    assert outcomes["CheckpointCorruptError"] > COUNT / 2
