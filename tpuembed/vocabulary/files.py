"""Where names come from: files with one a line, .npy arrays, and elements of datasets. No Python object is made for a line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError
from tpuembed.vocabulary.text import SLACK, Texts

__all__ = ["integers_in", "lines_of", "names_in", "names_of_element"]

_PIECE_BYTES: Final = 64 << 20
_LINES_AT_ONCE: Final = 1 << 20
_END: Final = 10
_RETURN: Final = 13
_MARK: Final = b"\xef\xbb\xbf"


def integers_in(path: Path) -> npt.NDArray[np.int64]:
    """Return the integers of a .npy file, or of a text file with one a line.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has something else.
    """
    if path.suffix == ".npy":
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"it has an array of {array.dtype} {list(array.shape)}, not of integers [n]")
        if array.dtype.kind == "u" and len(array) and int(array.max()) >= 2**63:
            raise ValueError(f"it has {array.max()}, which is no int64")
        return np.array(array, np.int64)
    lines = lines_of(path)
    found = np.empty(len(lines), np.int64)
    for start in range(0, len(lines), _LINES_AT_ONCE):
        some = lines.take(np.arange(start, min(start + _LINES_AT_ONCE, len(lines))))
        found[start : start + len(some)] = [_integer(some[index]) for index in range(len(some))]
    return found


def _integer(line: bytes) -> int:
    try:
        value = int(line.replace(b"_", b"."))  # Python takes 1_0 for 10
    except ValueError:
        raise ValueError(f"it has {line!r}, which is no integer") from None
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"it has {value}, which is no int64")
    return value


def names_in(path: Path) -> Texts:
    """Return the names of a text file with one a line.

    Raises:
        OSError: the file cannot be read.
        ValueError: all lines end with CR LF, or it begins with a byte order mark.
    """
    names = lines_of(path)
    if names.data[: len(_MARK)].tobytes() == _MARK:
        raise ValueError(
            "it begins with a byte order mark, which would be part of the first name. Save it as UTF-8 without one"
        )
    pieces = (slice(start, start + _LINES_AT_ONCE) for start in range(0, len(names), _LINES_AT_ONCE))
    if len(names) and all(
        (names.lengths[some] > 0).all() and (names.data[names.starts[some] + names.lengths[some] - 1] == _RETURN).all()
        for some in pieces
    ):
        raise ValueError("its lines end with CR LF, and names would end with CR. Convert it to lines that end with LF")
    return names


def lines_of(path: Path) -> Texts:
    """Return the lines of a file without their ends. A last line without an end counts.

    Raises:
        OSError: the file cannot be read.
    """
    data, size = _read(path)
    count = sum(int(np.count_nonzero(piece == _END)) for _, piece in _pieces(data[:size]))
    is_open = size > 0 and data[size - 1] != _END
    starts = np.zeros(count + 1, np.int64)
    done = 1
    for start, piece in _pieces(data[:size]):
        ends = np.flatnonzero(piece == _END)
        starts[done : done + len(ends)] = ends + (start + 1)
        done += len(ends)
    lengths: npt.NDArray[Any] = np.empty(count + is_open, np.int64 if size > 2**32 else np.uint32)
    np.subtract(starts[1:], starts[:-1], out=lengths[:count], casting="unsafe")
    lengths[:count] -= 1  # the end of the line
    if is_open:
        lengths[-1] = size - starts[-1]
    return Texts(data, starts[: len(lengths)], lengths)


def _read(path: Path) -> tuple[npt.NDArray[np.uint8], int]:
    """Return the bytes of a file, and SLACK more, and how many they are."""
    with path.open("rb", buffering=0) as file:
        data = np.zeros(path.stat().st_size + SLACK, np.uint8)
        room, done = data.data[: len(data) - SLACK], 0
        while done < len(room) and (read := file.readinto(room[done : done + _PIECE_BYTES])):
            done += read
    return data[: done + SLACK], done


def _pieces(data: npt.NDArray[np.uint8]) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    for start in range(0, len(data), _PIECE_BYTES):
        yield start, data[start : start + _PIECE_BYTES]


def names_of_element(element: Any) -> Any:
    """Return the names of an element of a dataset. Raises ConfigError if it has several parts."""
    if hasattr(element, "flat_values"):  # ragged
        element = element.flat_values
    elif hasattr(element, "dense_shape"):  # sparse
        element = element.values
    if isinstance(element, tuple | dict):
        raise ConfigError(
            f"vocabulary: adapt needs one array of names at a time, got a {type(element).__name__} of {len(element)} parts. Choose "
            'the part with the names, as in dataset.map(lambda row: row["user"]).'
        )
    return element.numpy() if hasattr(element, "numpy") else element
