"""Damages Orbax checkpoints at random and opens them: python -m tests.support.checkpoint.orbax_fuzzer SEED EXECUTIONS.

A process of its own, because TensorStore is C++: a crash, a hang and memory without bound have to be survived to be
reported. Every execution must end in a CheckpointError or in tables that read as they say they are; where only what
says which tables there are was damaged, in the rows that were written. Prints how many ended how, as JSON.
"""

import collections
import contextlib
import copy
import dataclasses
import faulthandler
import json
import random
import resource
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import google_crc32c
import numpy as np

from tests.support.checkpoint.orbax_trees import (
    STACKED,
    Array,
    Leaves,
    spec,
    stacked_rows,
    write_shards,
    write_spec,
    write_tree,
)
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import CheckpointError

__all__ = ["run"]

_SECONDS: Final = 20
_MEMORY: Final = 3 << 30
_ODD: Final[tuple[Any, ...]] = (
    None, True, False, -1, 0, 1, 2, 3, 255, 1 << 31, 1 << 53, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30, -(1 << 63), 0.5, 1e308,
    float("nan"), "", "a", "..", "../../../etc/passwd", "/etc/passwd", "\0", "a/b", ".", "<f8", ">f4", "|b1", "float64", "zstd",
    "blosc", [], [1], [1 << 40, 1 << 40], [0, 0], [-1, 4], {}, {"id": "gzip"}, {"key": "x", "key_type": 2}, "x" * 1000,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Target:
    """A file to damage.

    Attributes:
        checkpoint: what is opened.
        file: what is damaged; it is put back.
        damage: the damaged bytes.
        exact: whether tables that still open must hold what was written.
    """

    name: str
    checkpoint: Path
    file: Path
    damage: Callable[[random.Random, bytes], bytes]
    exact: bool


def bytes_changed(rng: random.Random, data: bytes) -> bytes:
    """Flipped, cut, doubled, overwritten."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(out) + 1)
        size = rng.choice([1, 1, 2, 8])
        kind = rng.randrange(6)
        if kind < 3 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 3:
            del out[at : at + size]
        elif kind == 4:
            out[at:at] = rng.randbytes(size) if rng.random() < 0.5 else out[at : at + size]
        else:
            out[at : at + size] = rng.choice([b"\xff", b"\x00", b"\x7f", b"\x80"]) * size
    return bytes(out[: rng.randrange(len(out) + 1)] if rng.random() < 0.1 else out)


def json_changed(rng: random.Random, data: bytes) -> bytes:
    """A value, a key or an entry of the document made odd."""
    document = json.loads(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        places = list(_places(document))
        if not places:
            break
        holder, key = rng.choice(places)
        kind = rng.randrange(4)
        if kind == 0 or (kind == 1 and not isinstance(holder, dict)):
            holder[key] = copy.deepcopy(rng.choice(_ODD))
        elif kind == 1:
            holder[str(rng.choice(_ODD))] = holder.pop(key)
        elif kind == 2:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(rng.choice(places)[0])
    return json.dumps(document).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _places(value[key])


def words_changed(rng: random.Random, data: bytes) -> bytes:
    """Words of a text taken out, doubled, swapped or made odd."""
    words = data.decode().split(" ")
    for _ in range(rng.choice([1, 1, 2, 4])):
        at, other = rng.randrange(len(words)), rng.randrange(len(words))
        odd = rng.choice(
            ['"', "{", "}", "<", "[", "# ", "-1", "0x7fffffffffffffff", "99999999999999999999", "0", "name:", "\\"]
        )
        words[at] = rng.choice(["", words[at] * 2, words[other], odd, words[at] + odd])
    return " ".join(words).encode()


def checked_bytes_changed(rng: random.Random, data: bytes) -> bytes:
    """Damage that the checksum at the end of OCDBT's files, and the length at their start, do not show."""
    if len(data) < 20:
        return data
    body = bytearray(bytes_changed(rng, data[12:-4]))
    out = data[:4] + struct.pack("<Q", len(body) + 16) + bytes(body)
    return out + struct.pack("<I", google_crc32c.value(out))


def either(*damages: Callable[[random.Random, bytes], bytes]) -> Callable[[random.Random, bytes], bytes]:
    return lambda rng, data: rng.choice(damages)(rng, data)


def make_targets(folder: Path) -> tuple[list[Target], dict[str, Array]]:
    """Small checkpoints of every form, and the tables that they hold."""
    rng = np.random.default_rng(0)
    stacked: dict[str, Array] = {name: rng.random(shape, np.float32) for name, shape in STACKED.items()}
    plain: dict[str, Array] = {
        "p/emb": rng.random((23, 4), np.float32),
        "p/half": rng.random((6, 2)).astype(np.float16),
    }
    leaves: Leaves = {tuple(name.split("/")): rows for name, rows in plain.items()}
    variables: Leaves = {
        ("a_b_c", "table"): stacked_rows(stacked),
        ("a_b_c", "slot", "accumulator"): stacked_rows(stacked),
    }
    write_tree(folder / "stacked" / "1" / "emb", variables)
    proto = write_spec(folder / "stacked" / "1" / "embedding_spec" / "proto.pbtxt", spec())
    (folder / "stacked" / "1" / "_CHECKPOINT_METADATA").write_text("{}")
    keras: Leaves = {
        ("trainable_variables", "de", "videos", "embeddings"): plain["p/emb"],
        ("optimizer_variables", "adagrad", "de_videos_embeddings_accumulator"): plain["p/emb"],
    }
    ocdbt = write_tree(folder / "ocdbt", leaves, chunks=(5, 3), compressed=False)
    files2 = write_tree(folder / "zarr2", leaves, chunks=(5, 3), ocdbt=False)
    files3 = write_tree(folder / "zarr3", leaves, chunks=(5, 3), ocdbt=False, zarr3=True)
    shards = write_shards(folder / "shards", plain["p/emb"], (5, 2), (10, 4))
    rs = write_tree(folder / "keras", keras)
    document = either(json_changed, json_changed, bytes_changed)
    tree = [Target("metadata", path, path / "_METADATA", document, True) for path in (ocdbt, files2, rs)]
    tree += [Target("metadata", folder / "stacked", folder / "stacked/1/emb/_METADATA", document, True)]
    tree += [
        Target("zarray", files2, files2 / "p.emb" / ".zarray", document, False),
        Target("zarr.json", files3, files3 / "p.emb" / "zarr.json", document, False),
        Target("spec", folder / "stacked", proto, either(words_changed, bytes_changed), False),
        Target("manifest", ocdbt, ocdbt / "manifest.ocdbt", bytes_changed, True),
        Target("manifest, CRC mended", ocdbt, ocdbt / "manifest.ocdbt", checked_bytes_changed, False),
    ]
    for path in sorted((ocdbt / "d").iterdir()):
        tree.append(Target("node or chunks", ocdbt, path, either(bytes_changed, checked_bytes_changed), False))
    tree += [
        Target("chunk", files2, path, bytes_changed, False) for path in sorted((files2 / "p.emb").glob("[0-9]*"))[:2]
    ]
    tree += [
        Target("chunk", files3, path, bytes_changed, False) for path in sorted((files3 / "p.emb/c").rglob("*/0"))[:2]
    ]
    tree += [Target("shard", shards, shards / "t" / "c" / "0" / "0", bytes_changed, False)]
    return tree, {**plain, **stacked, "videos": plain["p/emb"]}


def execute(target: Target, truth: dict[str, Array]) -> str:
    """How it ended; whatever else is raised is a finding."""
    try:
        with open_checkpoint(target.checkpoint) as checkpoint:
            checkpoint.fingerprint()
            for name, info in checkpoint.tables().items():
                first = max(0, info.rows - 50)
                for slot in (None, *info.slots):
                    rows = checkpoint.read(name, first, info.rows, slot)
                    assert rows.shape == (info.rows - first, info.dim)
                    assert rows.dtype == info.dtype or slot is not None
                    if target.exact and name in truth:
                        np.testing.assert_array_equal(rows, truth[name])
    except CheckpointError as error:
        outcome, message = type(error).__name__, str(error)
    else:
        outcome, message = "read", ""
    assert "\n" not in message
    assert len(message) < 2000
    return outcome


def run(seed: int, executions: int, *, limit_memory: bool = True) -> dict[str, dict[str, int]]:
    """How many executions ended how, by target."""
    rng = random.Random(seed)
    outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory() as folder:
        targets, truth = make_targets(Path(folder))
        names = sorted({target.name for target in targets})
        if limit_memory:
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        for number in range(executions):
            name = rng.choice(names)
            target = rng.choice([target for target in targets if target.name == name])
            whole = target.file.read_bytes()
            damaged = target.damage(rng, whole)
            target.file.write_bytes(damaged)
            faulthandler.dump_traceback_later(_SECONDS, exit=True)
            try:
                outcomes[target.name][execute(target, truth)] += 1
            except BaseException:
                print(f"execution {number} of seed {seed}: {target.name}: {damaged!r}", file=sys.stderr)
                raise
            finally:
                faulthandler.cancel_dump_traceback_later()
                with contextlib.suppress(OSError):
                    target.file.write_bytes(whole)
    return {name: dict(counter) for name, counter in sorted(outcomes.items())}


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]))))
