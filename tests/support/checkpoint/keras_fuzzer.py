"""Mutates Keras' weight files and reads them, over and over, in a process that may be killed.

`python -m tests.support.checkpoint.keras_fuzzer ...`

Every execution must end in a CheckpointError that names the file, or in rows. HDF5 without checksums cannot tell every
flipped bit, so rows may be wrong; how many are is counted. Where the HDF5 library crashes or hangs, this process ends, and
whoever started it goes on after that execution.
"""

import collections
import contextlib
import io
import json
import random
import resource
import signal
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import CheckpointError

_SECONDS = 5
_NUMBERS = (0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


def mutate(rng: random.Random, data: bytes) -> bytes:
    """A few bytes of `data` flipped, overwritten, cut out, doubled or dropped from the end."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        position = rng.randrange(max(1, len(changed)))
        action = rng.randrange(12)
        if action < 6 and changed:
            changed[position] ^= 1 << rng.randrange(8)
        elif action < 8:
            changed[position : position + 1] = bytes([rng.randrange(256)])
        elif action < 10:
            number = rng.choice((*_NUMBERS, len(data), rng.randrange(len(data))))
            changed[position : position + 8] = struct.pack("<Q", number)
        elif action == 10:
            del changed[position : position + rng.choice((1, 8, 512))]
        else:
            del changed[position:]
    return bytes(changed)


def rewritten(rng: random.Random, whole: bytes) -> bytes:
    """A `.keras` file whose member, not the archive around it, is mutated; its CRC right."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as source, zipfile.ZipFile(out, "w") as target:
        chosen = rng.choice(("model.weights.h5", "config.json"))
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, mutate(rng, data) if name == chosen else data)
    return out.getvalue()


def read(path: Path) -> dict[str, bytes]:
    """All rows of all tables and slots."""
    with open_checkpoint(path) as checkpoint:
        return {
            f"{name} {slot}": checkpoint.read(name, slot=slot).tobytes()
            for name, info in checkpoint.tables().items()
            for slot in (None, *info.slots)
        }


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    signal.alarm(_SECONDS)
    yield
    signal.alarm(0)


def run(source: Path, changed: str, folder: Path, first: int, last: int) -> None:
    """Executions [first, last) on copies of `source`, in which the file `changed` is mutated.

    After every execution `folder`/progress says how many ended how, which outlives this process.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
    files = {path.name: path.read_bytes() for path in source.iterdir() if path.suffix in (".h5", ".keras", ".json")}
    files.pop("truth.json", None)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    opened = folder / (changed if changed.endswith(".keras") or len(files) == 1 else min(files))
    truth, outcomes = read(opened), collections.Counter[str]()
    with open(folder / "progress", "w+b", buffering=0) as progress:
        progress.write(b"{}")
        for number in range(first, last):
            rng = random.Random(f"{source} {changed} {number}")
            data = files[changed]
            inside = changed.endswith(".keras") and rng.random() < 0.7
            (folder / changed).write_bytes(rewritten(rng, data) if inside else mutate(rng, data))
            with alarm():
                outcomes[execute(opened, truth)] += 1
            progress.seek(0)
            progress.write(json.dumps(outcomes).encode() + b"\n")  # never shorter than before


def execute(path: Path, truth: dict[str, bytes]) -> str:
    try:
        found = read(path)
    except CheckpointError as error:
        message = str(error)
        assert str(path.parent) in message, message
        assert "\n" not in message, message
        return type(error).__name__
    if found == truth:
        return "right"
    return "names or slots differ" if found.keys() != truth.keys() else "values differ"


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
