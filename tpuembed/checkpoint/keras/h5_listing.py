"""The content of HDF5 files, listed by the HDF5 library in a separate process and checked against the files' sizes."""

import contextlib
import dataclasses
import importlib.util
import json
import math
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpuembed.checkpoint.keras import h5_lister
from tpuembed.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError, MissingExtraError, reason
from tpuembed.files import ByteFile

__all__ = ["Dataset", "Listing", "Window", "list_files"]

_TIMEOUT_SECONDS: Final = 120.0
_PROCESSOR_SECONDS = 15
_MAX_ANSWER_BYTES: Final = 64 << 20


@dataclasses.dataclass(frozen=True)
class Window:
    """A file, or a part of one: `size` bytes from `start` on.

    Attributes:
        name: for messages.
    """

    name: str
    file: ByteFile
    start: int
    size: int

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out`, contiguous bytes, with the bytes at `offset`.

        Raises:
            CheckpointCorruptError: the file has become shorter.
            CheckpointError: the system refuses.
        """
        try:
            self.file.read_into(self.start + offset, out)
        except EOFError as error:
            raise CheckpointCorruptError(
                f"weights file {error}. It was truncated after it was opened. Read it when no program writes to it."
            ) from None
        except OSError as error:
            raise CheckpointError(f"weights file {self.name}: cannot be read: {reason(error)}.") from None


@dataclasses.dataclass(frozen=True)
class Dataset:
    """An array in an HDF5 file.

    Attributes:
        file: the file.
        path: its name there.
        shape: None if it has none.
        dtype: as numpy spells it, with byte order.
        stated_dtype: Keras' attribute for an array whose dtype HDF5 does not have: "bfloat16".
        layout: contiguous, chunked, compact, virtual or external.
        stored_bytes: bytes that it takes in the file.
        offset: of its bytes, if it is contiguous and has been written.
        chunk: the shape of its chunks.
        filters: (number, options) of the filters of every chunk, in the order of writing.
        places: offset and size of every chunk, -1 if it was not written: [chunks, 2], row-major in their grid.
    """

    file: Window
    path: str
    shape: tuple[int, ...] | None
    dtype: str
    stated_dtype: str | None
    layout: str
    stored_bytes: int = 0
    offset: int | None = None
    chunk: tuple[int, ...] = ()
    filters: tuple[tuple[int, tuple[int, ...]], ...] = ()
    places: np.ndarray[Any, np.dtype[np.int64]] | None = None

    @property
    def shown(self) -> str:
        """Return the name for messages."""
        return f"weights file {self.file.name}: dataset {self.path!r}"

    @property
    def element_bytes(self) -> int:
        """Return the bytes of one element; 0 for a dtype that numpy does not know."""
        try:
            return np.dtype(self.dtype).itemsize
        except TypeError:
            return 0

    @property
    def bytes(self) -> int:
        """Return the bytes of all elements."""
        return 0 if self.shape is None else self.element_bytes * math.prod(self.shape)

    def check_contiguous(self) -> None:
        """Raise an error unless the bytes of the dataset are in one piece.

        Raises:
            CheckpointFormatError: HDF5 stores it in another layout.
            CheckpointCorruptError: it was never written.
        """
        if self.layout != "contiguous" or self.shape is None:
            raise CheckpointFormatError(
                f"{self.shown} has HDF5's {self.layout} layout, which is not supported. Save the weights again with Keras."
            )
        if self.offset is None and self.bytes:
            raise CheckpointCorruptError.of(f"{self.shown} was never written")

    def read(self) -> bytearray:
        """Return the bytes of all elements, which are in one piece."""
        out = bytearray(self.bytes)
        self.file.read_into(self.offset or 0, memoryview(out))
        return out


@dataclasses.dataclass(frozen=True)
class Listing:
    """The content of one file.

    Attributes:
        groups: Keras' groups of variables: path -> the name of the layer or table, if the file has it.
        datasets: by path.
    """

    groups: Mapping[str, str | None]
    datasets: Mapping[str, Dataset]


def list_files(files: Sequence[Window]) -> list[Listing]:
    """Return the listings of HDF5 files. Datasets of a file do not share bytes.

    Raises:
        MissingExtraError: h5py is not installed.
        CheckpointCorruptError: a file is damaged, or malicious.
    """
    _require_h5py()
    answers, places = _run_lister(files)
    listings = [_listing(file, answer, places) for file, answer in zip(files, answers, strict=True)]
    for file, answer, listing in zip(files, answers, listings, strict=True):
        _check_places(file, listing.datasets.values(), answer["headers"])
    return listings


def _require_h5py() -> None:
    with contextlib.suppress(ValueError):  # set to None in sys.modules
        if importlib.util.find_spec("h5py"):
            return
    raise MissingExtraError("reading Keras weight files", "h5py", "hdf5")


def _run_lister(files: Sequence[Window]) -> tuple[list[dict[str, Any]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the other process's answer: one listing per file, and the places of all chunks."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
    connection, other_end = multiprocessing.Pipe()
    with connection:
        with other_end:
            command = [sys.executable, "-P", str(Path(h5_lister.__file__)), str(other_end.fileno())]
            process = subprocess.Popen(
                command,
                pass_fds=[other_end.fileno()],
                stderr=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
            )
        timer = threading.Timer(_TIMEOUT_SECONDS, process.kill)
        timer.start()
        try:
            return _serve(connection, files)
        finally:
            timer.cancel()
            process.kill()
            process.wait()


def _serve(
    connection: Connection, files: Sequence[Window]
) -> tuple[list[dict[str, Any]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Send the bytes that the other process requests, and return its answer."""
    file = files[0]
    try:
        connection.send_bytes(json.dumps([_PROCESSOR_SECONDS, [file.size for file in files]]).encode())
        while isinstance(message := json.loads(connection.recv_bytes(_MAX_ANSWER_BYTES)), list):
            number, offset, length = message
            file, out = files[number], bytearray(min(length, _MAX_ANSWER_BYTES))
            file.read_into(offset, memoryview(out))
            connection.send_bytes(out)
        places = np.frombuffer(connection.recv_bytes(_MAX_ANSWER_BYTES), "<i8").reshape(-1, 2)
        return message["files"], places
    except (EOFError, OSError, ValueError, TypeError, LookupError):  # it died, or sent an invalid message
        raise CheckpointCorruptError.of(
            f"weights file {file.name}: the HDF5 library hangs, crashes or needs too much memory on it"
        ) from None


def _listing(file: Window, answer: Mapping[str, Any], places: np.ndarray[Any, np.dtype[np.int64]]) -> Listing:
    if answer["trouble"] is not None:
        raise CheckpointCorruptError.of(f"weights file {file.name}: cannot be read as HDF5: {answer['trouble']}")
    datasets = [_dataset(file, found, places) for found in answer["datasets"]]
    return Listing(answer["groups"], {dataset.path: dataset for dataset in datasets})


def _dataset(file: Window, found: Mapping[str, Any], places: np.ndarray[Any, np.dtype[np.int64]]) -> Dataset:
    shape = None if found["shape"] is None else tuple(found["shape"])
    names = ("path", "dtype", "stated_dtype", "layout", "stored_bytes", "offset")
    dataset = Dataset(file=file, shape=shape, **{name: found[name] for name in names})
    if found["layout"] != "chunked":
        return dataset
    chunk = tuple(found["chunk"])
    count = int(np.prod([-(-size // side) for size, side in zip(shape or (), chunk, strict=True)], dtype=object))
    return dataclasses.replace(
        dataset,
        chunk=chunk,
        filters=tuple((code, tuple(options)) for code, options in found["filters"]),
        places=places[found["first_chunk"] : found["first_chunk"] + count],
    )


def _check_places(file: Window, datasets: Iterable[Dataset], headers: Iterable[Sequence[int]]) -> None:
    """Raise CheckpointCorruptError unless the bytes of all datasets are inside `file` and do not overlap."""
    spans = [(offset, size, "an object's header") for offset, size in headers]
    for dataset in datasets:
        spans += ((offset, size, f"dataset {dataset.path!r}") for offset, size in _spans(file, dataset))
    end, before = 0, ""
    for offset, size, what in sorted(span for span in spans if span[1]):
        if offset < 0 or size < 0 or offset + size > file.size:
            raise CheckpointCorruptError.of(
                f"weights file {file.name}: {what} is at bytes [{offset}, {offset + size}) of {file.size}. The file is "
                "truncated or damaged"
            )
        if offset < end:
            raise CheckpointCorruptError.of(
                f"weights file {file.name}: {what} starts at byte {offset}, inside {before}, which ends at {end}"
            )
        end, before = offset + size, what


def _spans(file: Window, dataset: Dataset) -> list[tuple[int, int]]:
    """Return (offset, size) of the bytes of a dataset."""
    if dataset.places is not None:
        return [(offset, size) for offset, size in dataset.places.tolist() if offset >= 0]
    if dataset.offset is None:
        return []
    if dataset.element_bytes and dataset.stored_bytes != dataset.bytes:
        raise CheckpointCorruptError.of(
            f"weights file {file.name}: dataset {dataset.path!r} is {dataset.dtype} {dataset.shape}, {dataset.bytes} "
            f"bytes, but {dataset.stored_bytes} are stored"
        )
    return [(dataset.offset, dataset.stored_bytes)]
