"""HDF5 files, read with h5py: what is in them, and the values of their arrays."""

import contextlib
import dataclasses
import io
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np

from tpuembed.checkpoint.types import Array
from tpuembed.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError, MissingExtraError, reason
from tpuembed.files import ByteFile, ByteStream

__all__ = ["READ_BYTES", "Dataset", "Listing", "Window", "list_file"]

_BLOCK_BYTES: Final = 1 << 16
READ_BYTES: Final = 1 << 20
"""The most bytes that a read holds beside its rows."""
_VARS: Final = "vars"
_DTYPES: Final = {"<f4": "float32", "<f8": "float64", "<f2": "float16"}


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


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """An array in an HDF5 file.

    Attributes:
        file: the file.
        path: its name there.
        handle: h5py's dataset.
        shape: None if it has none.
        dtype: as numpy spells it, with byte order.
        stated_dtype: Keras' attribute for an array whose dtype HDF5 does not have: "bfloat16".
    """

    file: Window
    path: str
    handle: Any
    shape: tuple[int, ...] | None
    dtype: str
    stated_dtype: str | None

    @property
    def bytes(self) -> int:
        """Returns the bytes of all elements."""
        return 0 if self.shape is None else self.handle.dtype.itemsize * math.prod(self.shape)

    @property
    def matrix_dtype(self) -> np.dtype[Any] | None:
        """Returns the dtype of a matrix of floats; None for any other dataset."""
        if self.shape is None or len(self.shape) != 2:
            return None
        if self.dtype == "|V2" and self.stated_dtype == "bfloat16":
            return np.dtype(ml_dtypes.bfloat16)
        name = _DTYPES.get(self.dtype)
        return None if name is None else np.dtype(name)

    def check_written(self) -> None:
        """Raise CheckpointCorruptError unless all elements are in the file. HDF5 reads missing ones as zeros."""
        with _parsing(self.file):
            found = self.handle.id.get_storage_size()
        if self.shape is None or found != self.bytes:
            raise CheckpointCorruptError.of(
                f"weights file {self.file.name}: dataset {self.path!r} has {found} bytes in the file, but should have {self.bytes}"
            )

    def read_into(self, start: int, out: Array) -> None:
        """Fill `out`, [n, ...] of the array's dtype, with the existing rows [start, start + n)."""
        if not out.size:
            return
        out = out.view(self.handle.dtype)
        with _parsing(self.file):
            if out.flags.c_contiguous:
                self.handle.read_direct(out, np.s_[start : start + len(out)])
                return
            step = max(1, READ_BYTES // (out.nbytes // len(out)))
            for row in range(0, len(out), step):
                out[row : row + step] = self.handle[start + row : start + min(row + step, len(out))]

    def read(self) -> Array:
        """Returns all elements.

        Raises:
            CheckpointCorruptError: some of them were never written.
        """
        self.check_written()
        with _parsing(self.file):
            values = np.asarray(self.handle[()])
        return values.view(ml_dtypes.bfloat16) if self.stated_dtype == "bfloat16" else values


@dataclasses.dataclass(frozen=True)
class Listing:
    """The content of one file.

    Attributes:
        file: h5py's file.
        groups: Keras' groups of variables: path -> the name of the layer or table, if the file has it.
        datasets: by path.
    """

    file: Any
    groups: Mapping[str, str | None]
    datasets: Mapping[str, Dataset]


def list_file(window: Window) -> Listing:
    """Open an HDF5 file, and list what is in it.

    Raises:
        MissingExtraError: h5py is not installed.
        CheckpointCorruptError: h5py cannot parse the file, or it refers to other files.
    """
    try:
        import h5py
    except ImportError:
        raise MissingExtraError("reading Keras weight files", "h5py", "hdf5") from None
    with _parsing(window), contextlib.ExitStack() as opened:
        stream = io.BufferedReader(ByteStream(window.read_into, window.size), _BLOCK_BYTES)
        file = opened.enter_context(h5py.File(stream, "r"))
        groups: dict[str, str | None] = {}
        datasets: dict[str, Dataset] = {}
        seen: set[int] = set()
        pending = [("", file)]
        while pending:
            path, group = pending.pop()
            if path.rpartition("/")[2] == _VARS:
                groups[path] = _text(group, "name")
            for key in group:
                name = f"{path}/{key}" if path else key
                link = group.get(key, getlink=True)
                # A link could lead to any other file of this machine.
                if not isinstance(link, h5py.HardLink):
                    raise ValueError(f"{name!r} is a {type(link).__name__}, which is not followed")
                child = group[key]
                address = h5py.h5o.get_info(child.id).addr
                if address in seen:
                    raise ValueError(f"object {name!r} is listed twice, or is inside itself")
                seen.add(address)
                if isinstance(child, h5py.Group):
                    pending.append((name, child))
                elif isinstance(child, h5py.Dataset):
                    datasets[name] = _dataset(h5py, window, name, child)
        opened.pop_all()
    return Listing(file, groups, datasets)


def _dataset(h5py: Any, window: Window, path: str, dataset: Any) -> Dataset:
    properties = dataset.id.get_create_plist()
    if properties.get_external_count() or dataset.is_virtual:
        raise CheckpointFormatError(
            f"weights file {window.name}: dataset {path!r} is in other files, which is not supported. Save the weights again "
            "with Keras."
        )
    if dataset.chunks is not None:
        raise CheckpointFormatError(
            f"weights file {window.name}: dataset {path!r} is stored in chunks, which Keras does not write. Write it in one "
            "piece: h5repack -l CONTI -f NONE IN OUT."
        )
    dtype, stored = str(dataset.dtype.str), dataset.id.get_type()
    if stored.get_class() != h5py.h5t.OPAQUE and not stored.equal(h5py.h5t.py_create(dataset.dtype)):
        dtype = f"unusual {dtype}"  # numpy has no type that is exactly that one
    return Dataset(window, path, dataset, dataset.shape, dtype, _text(dataset, "dtype"))


def _text(thing: Any, name: str) -> str | None:
    value = thing.attrs.get(name)
    return value if isinstance(value, str) else None


@contextlib.contextmanager
def _parsing(file: Window) -> Iterator[None]:
    """Turn h5py's errors into CheckpointCorruptErrors: it raises many types for bytes that it cannot parse."""
    try:
        yield
    except CheckpointError:
        raise
    except MemoryError:
        problem = "it claims more than fits in memory"
    except Exception as error:
        problem = " ".join(str(error).split())[:300] or type(error).__name__
    else:
        return
    raise CheckpointCorruptError.of(f"weights file {file.name}: cannot be read as HDF5: {problem}")
