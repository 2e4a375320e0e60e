"""Damage at random to `checkpoint` files and to data files: nothing but a CheckpointError, and never a wrong answer."""

import collections
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tpuembed.checkpoint.location import find_bundle
from tpuembed.errors import CheckpointError
from tpuembed.files import FilePath, as_path, remote

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
