"""Checkpoints for the exporter's tests: a bundle of plain tables, its metadata, and readers that misbehave.

Worker processes import this module to open them, so it imports no TensorFlow.
"""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tpuembed.checkpoint import Checkpoint, TableInfo
from tpuembed.checkpoint.types import PartialChecksum
from tpuembed.errors import CheckpointCorruptError, CheckpointError
from tpuembed.export.stream.shard import Source
from tpuembed.formats.tensor_bundle import Bundle, Entry, crc, index_path, shard_path, write_index

Array = npt.NDArray[Any]
FLOAT32: np.dtype[Any] = np.dtype(np.float32)


def info(name: str, rows: int, dim: int, dtype: np.dtype[Any] = FLOAT32) -> TableInfo:
    """What a checkpoint says of a table without slots."""
    return TableInfo(name, rows, dim, dtype)


class RecordedChecksums:
    """Checksums of the rows in order."""

    def __init__(self, of_tables: Mapping[str, int]) -> None:
        self._of_tables = of_tables

    def recorded(self, table: str, slot: str | None = None) -> int | None:
        return self._of_tables[table]

    def piece_rows(self, table: str) -> None:
        return None

    def reader(self, table: str) -> None:
        return None

    def proven(self, tables: Iterable[str], sums: Mapping[str, PartialChecksum]) -> Mapping[str, bool]:
        return {}


class FakeCheckpoint(Checkpoint):
    """The tables of a bundle by key; without discovery and slots."""

    format = "fake"

    def __init__(self, path: str) -> None:
        self.path = path
        self._bundle = Bundle.open(path)
        self._tables = {
            key: _info(key, self._bundle.read_rows(key, 0, 0), entry) for key, entry in self._bundle.entries.items()
        }

    def _dtype(self, table: str, slot: str | None) -> np.dtype[Any]:
        return self._tables[table].dtype

    def _fill(self, table: str, slot: str | None, start: int, out: Array) -> None:
        self._bundle.read_rows(table, start, start + len(out), out)

    @property
    def checksums(self) -> "RecordedChecksums":
        return RecordedChecksums({key: entry.crc32c for key, entry in self._bundle.entries.items()})

    def verify(self, tables: Iterable[str], slot: str | None = None) -> None:
        for table in tables:
            self._bundle.verify(table)

    def fingerprint(self) -> str:
        return str(index_path(self.path).stat().st_mtime_ns)

    def close(self) -> None:
        self._bundle.close()


class SlowCheckpoint(FakeCheckpoint):
    def read_into(self, table: str, start: int, out: Array, slot: str | None = None) -> None:
        time.sleep(0.02)
        super().read_into(table, start, out)


class LoggedCheckpoint(SlowCheckpoint):
    """Logs the start of every read beside the checkpoint, before it reads."""

    def read_into(self, table: str, start: int, out: Array, slot: str | None = None) -> None:
        with open(f"{self.path}.log", "a") as log:
            log.write(f"{table} {start}\n")
        super().read_into(table, start, out)


class DyingCheckpoint(FakeCheckpoint):
    """Kills its process in the second half of a table, when the other workers are busy."""

    def read_into(self, table: str, start: int, out: Array, slot: str | None = None) -> None:
        time.sleep(0.02)
        if start * 2 > self.tables()[table].rows:
            os.kill(os.getpid(), signal.SIGKILL)
        super().read_into(table, start, out)


class FlakyCheckpoint(FakeCheckpoint):
    """Fails at a read once per file `{path}.trouble-*`, in the way that the file's name says."""

    def read_into(self, table: str, start: int, out: Array, slot: str | None = None) -> None:
        for trouble in sorted(Path(self.path).parent.glob("*.trouble-*")):
            with contextlib.suppress(FileNotFoundError):  # two workers saw it
                trouble.unlink()
                _make_trouble(trouble.suffix.split("-")[1])
        super().read_into(table, start, out)


def _make_trouble(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))
    except OSError as error:
        raise CheckpointError(f"data file: cannot be read: {error.strerror}") from None


class CorruptCheckpoint(FakeCheckpoint):
    def read_into(self, table: str, start: int, out: Array, slot: str | None = None) -> None:
        raise CheckpointCorruptError(f"table {table!r}: bad rows at {start}")


class OtherChecksumCheckpoint(FakeCheckpoint):
    """States the checksum of other rows than it has."""

    @property
    def checksums(self) -> "RecordedChecksums":
        return RecordedChecksums({key: entry.crc32c ^ 1 for key, entry in self._bundle.entries.items()})


class BuggyCheckpoint(FakeCheckpoint):
    def read_into(self, table: str, start: int, out: Array, slot: str | None = None) -> None:
        print("noise on stdout")
        raise ZeroDivisionError("a defect")


class ExitingCheckpoint(FakeCheckpoint):
    def read_into(self, table: str, start: int, out: Array, slot: str | None = None) -> None:
        os.write(2, b"first\nlast words\n")
        os._exit(7)


def write_checkpoint(prefix: Path, tables: Mapping[str, Array]) -> dict[str, TableInfo]:
    """A bundle that holds `tables`, one after another in one data file; what a checkpoint says about them."""
    entries = {}
    with open(shard_path(prefix, 0, 1), "wb") as file:
        for name, values in tables.items():
            data = values.tobytes()
            entries[name] = Entry(
                dtype=values.dtype.name, shape=values.shape, offset=file.tell(), size=len(data), crc32c=crc.value(data)
            )
            file.write(data)
    write_index(index_path(prefix), entries, 1)
    return {name: _info(name, values, values) for name, values in tables.items()}


def _info(name: str, values: Array, whole: Array | Entry) -> TableInfo:
    rows, dim = whole.shape
    return TableInfo(name, rows, dim, values.dtype)


def source_of(prefix: Path, reader: type[FakeCheckpoint] = FakeCheckpoint) -> Source:
    """`prefix` as workers open it, with `reader`."""
    fingerprint = reader(str(prefix)).fingerprint()
    return Source(path=str(prefix), fingerprint=fingerprint, opener=f"{__name__}:{reader.__name__}")


def random_table(rows: int, dim: int, dtype: Any = np.float32, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, dim), np.float32).astype(dtype)


class LoggedReads:
    """A checkpoint of any format whose reads are slow, and logged before they begin."""

    def __init__(self, checkpoint: Checkpoint, log: str, seconds: float) -> None:
        self._checkpoint, self._log, self._seconds = checkpoint, log, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def read_into(self, table: str, start: int, out: Array, slot: str | None = None) -> None:
        with open(self._log, "a") as log:
            log.write(f"{table} {start}\n")
        time.sleep(self._seconds)
        self._checkpoint.read_into(table, start, out, slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._checkpoint.close()


def write_large_table(prefix: Path, rows: int, dim: int) -> dict[str, TableInfo]:
    """A checkpoint of one table of random bits, made and checksummed in pieces of 16 MiB."""
    generator, checksum = np.random.default_rng(5), 0
    with open(shard_path(prefix, 0, 1), "wb") as file:
        for start in range(0, rows, (16 << 20) // (4 * dim)):
            piece = generator.standard_normal((min(rows - start, (16 << 20) // (4 * dim)), dim), np.float32)
            checksum = crc.extend(checksum, piece.reshape(-1).view(np.uint8))
            file.write(piece.data)
    entry = Entry(dtype="float32", shape=(rows, dim), size=rows * dim * 4, crc32c=checksum)
    write_index(index_path(prefix), {"t": entry}, 1)
    return FakeCheckpoint(str(prefix)).tables()
