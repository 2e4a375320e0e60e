"""Damages checkpoints in tensor bundles at random and reads them.

python -m tests.support.checkpoint.bundle_fuzzer GOLDEN SEED COUNT

A process of its own, with bounded memory and time, so that a crash, a hang or an allocation by an unproven number shows.
What is damaged carries right checksums afterwards, or no damage but to the checksums would be met. Every execution must
end in a CheckpointError or in tables that read as they say they are; where the index file's own bytes were damaged, whose
checksums are left as they were, in the rows that were written. Prints how many ended how, as JSON: "right" is every row as
it was written; "other tables" and "other rows" are what a wrong index with right checksums says, and only damage to what the
checksums would have covered may end so.
"""

import collections
import contextlib
import faulthandler
import io
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.support.checkpoint.strings import encode_strings
from tests.support.goldens import FOLDER, Golden, read_golden
from tpuembed.checkpoint import Checkpoint, open_checkpoint
from tpuembed.checkpoint.location import find_bundle
from tpuembed.errors import CheckpointError
from tpuembed.formats.protobuf import varint
from tpuembed.formats.sstable import read_table, write_table
from tpuembed.formats.tensor_bundle import Entry, index_path, read_index, shard_path
from tpuembed.formats.tensor_bundle.entries import encode_entries

__all__ = ["run"]

_SECONDS: Final = 20
_MEMORY_BYTES: Final = 3 << 30
_ODD: Final = [
    varint(value) for value in (0, 1, 7, 127, 128, 1 << 31, (1 << 31) - 1, 1 << 62, 1 << 63, (1 << 64) - 1, -1)
]
_STRINGS: Final = ("_CHECKPOINTABLE_OBJECT_GRAPH", "_sparse_core_table_layouts")


def bytes_changed(rng: random.Random, data: bytes) -> bytes:
    """One to three times flipped, overwritten, cut, doubled, moved or cut off."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(changed) + 1)
        size = rng.choice((1, 1, 2, 8, 64))
        piece = changed[at : at + size]
        kind = rng.randrange(7)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at : at + size] = rng.randbytes(len(piece))
        elif kind == 2:
            changed[at : at + rng.randint(0, 2)] = rng.choice(_ODD)
        elif kind == 3:
            del changed[at : at + size]
        elif kind == 4:
            changed[at:at] = piece
        elif kind == 5:
            to = rng.randrange(len(changed) + 1)
            changed[to : to + len(piece)] = piece
        else:
            del changed[at:]
    return bytes(changed)


class Patient:
    """A copy of a golden whose index, object graph and layouts can be damaged over and over."""

    def __init__(self, golden: str, folder: Path) -> None:
        self.truth = read_golden(golden)
        copy = Path(shutil.copytree(FOLDER / golden, folder / "golden"))
        self.opened = copy / self.truth.path.relative_to(FOLDER / golden)
        prefix = find_bundle(self.opened)
        assert isinstance(prefix, Path)
        self._prefix, self._index = prefix, index_path(prefix).read_bytes()
        index = read_index(index_path(prefix))
        assert index.num_shards == 1
        self.items = dict(read_table(io.BytesIO(self._index)))
        self._data_bytes = shard_path(prefix, 0, 1).stat().st_size
        with open_checkpoint(self.opened, **self.truth.options) as checkpoint:
            assert compare(checkpoint, self.truth) == "right"
            bundle = checkpoint.bundle  # type: ignore[attr-defined]
            texts = [key for key in index.entries if any(text in key for text in _STRINGS)]
            self._strings = {key: bundle.read_string(key) for key in texts}

    def damage(self, rng: random.Random) -> str:
        """Damage one thing and say what."""
        kinds = ["index bytes", "entry", "key", *self._strings, *self._strings]
        kind = rng.choice(kinds)
        if kind == "index bytes":
            index_path(self._prefix).write_bytes(bytes_changed(rng, self._index))
        elif kind in self._strings:
            self._write(self.items | self._string(kind, bytes_changed(rng, self._strings[kind])))
        else:
            key = rng.choice(list(self.items))
            value = self.items[key]
            other = {key: bytes_changed(rng, value)} if kind == "entry" else {bytes_changed(rng, key): value}
            kept = {name: item for name, item in self.items.items() if name != key}
            self._write(kept | other)
        return kind if kind in ("index bytes", "entry", "key") else kind.split("/")[-3 if "/" in kind else 0]

    def rename(self, key: bytes, other: bytes) -> None:
        """The index, checksums right, with `other` in the place of `key`."""
        self._write({name: item for name, item in self.items.items() if name != key} | {other: self.items[key]})

    def _string(self, key: str, text: bytes) -> dict[bytes, bytes]:
        """`text`, put at the end of the data file, and its entry."""
        payload, crc32c = encode_strings([text])
        with open(shard_path(self._prefix, 0, 1), "r+b") as file:
            file.truncate(self._data_bytes)
            file.seek(self._data_bytes)
            file.write(payload)
        entry = Entry(dtype="string", shape=(), offset=self._data_bytes, size=len(payload), crc32c=crc32c)
        return encode_entries(key, entry)

    def _write(self, items: Mapping[bytes, bytes]) -> None:
        with open(index_path(self._prefix), "wb") as file:
            write_table(file, sorted(items.items()))


def read_some(checkpoint: Checkpoint) -> None:
    """The first and the last rows of everything; they have to be what they are said to be."""
    for name, info in checkpoint.tables().items():
        for slot in (None, *info.slots):
            for start in {0, max(0, info.rows - 3)}:
                rows = checkpoint.read(name, start, min(info.rows, start + 3), slot)
                assert rows.shape == (min(info.rows, start + 3) - start, info.dim)
                assert slot is not None or rows.dtype == info.dtype


def compare(checkpoint: Checkpoint, truth: Golden) -> str:
    """Whether the tables, and then their rows, are those that were written."""
    found = {
        name: {(slot, info.rows, info.dim) for slot in (None, *info.slots)}
        for name, info in checkpoint.tables().items()
    }
    if found != {name: {(slot, *rows.shape) for slot, rows in slots.items()} for name, slots in truth.tables.items()}:
        return "other tables"
    same = (
        np.array_equal(checkpoint.read(name, slot=slot), rows)
        for name, slots in truth.tables.items()
        for slot, rows in slots.items()
    )
    return "right" if all(same) else "other rows"


@contextlib.contextmanager
def deadline() -> Iterator[None]:
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def execute(patient: Patient, rng: random.Random) -> str:
    kind = patient.damage(rng)
    try:
        with deadline(), open_checkpoint(patient.opened, **patient.truth.options) as checkpoint:
            read_some(checkpoint)
            outcome = compare(checkpoint, patient.truth)
    except CheckpointError as error:
        refusal = error
    else:
        assert outcome == "right" or kind != "index bytes", outcome
        return f"{kind}: {outcome}"
    assert str(refusal).isprintable(), refusal
    assert len(str(refusal)) < 4000, refusal
    return f"{kind}: {type(refusal).__name__}"


def run(golden: str, seed: int, count: int) -> dict[str, Any]:
    """How many executions ended how; "failures" are those that should not, with their seeds."""
    outcomes: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    started = time.monotonic()
    memory = Path("/dev/shm")  # every execution writes a file
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        patient = Patient(golden, Path(folder))
        for number in range(seed, seed + count):
            try:
                outcomes[execute(patient, random.Random(f"{golden} {number}"))] += 1
            except Exception:
                failures.append(f"{number}: {traceback.format_exc(limit=-4)}")
                if len(failures) > 20:
                    break
    return {"outcomes": dict(sorted(outcomes.items())), "seconds": time.monotonic() - started, "failures": failures}


def main() -> None:
    faulthandler.register(signal.SIGALRM, chain=True)  # its own watchdog thread would take most of the time
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), indent=1))


if __name__ == "__main__":
    main()
