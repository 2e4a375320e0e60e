"""Names as arrays: of dtype object with bytes, or int64. Where they come from: lists, files, and elements of datasets."""

from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError

__all__ = ["DType", "Names", "array_of", "integers_in", "names_in", "names_of_element"]

Names = npt.NDArray[Any]
DType = Literal["string", "int64"]

_MARK: Final = b"\xef\xbb\xbf"


def array_of(names: Any, dtype: DType) -> Names:
    """Return names in an array of their shape, str in UTF-8. Raises ConfigError for another type, or no UTF-8."""
    if dtype == "string":
        array = names if isinstance(names, np.ndarray) else np.array(names, object)
        found = np.empty(array.size, object)
        found[:] = _encoded(array.ravel().tolist())
        return found.reshape(array.shape)
    array = np.asarray(names)
    if array.dtype.kind in "fO":  # numpy makes floats of integers of 64 bits with and without a sign
        for name in np.array(names, object).ravel().tolist():
            if isinstance(name, bool) or not isinstance(name, int | np.integer) or not -(2**63) <= name < 2**63:
                raise ConfigError(f"vocabulary: a name must be an int64, got {name!r}, a {type(name).__name__}.")
    elif array.dtype.kind not in "iu":
        raise ConfigError(f"vocabulary: names must be integers, got an array of {array.dtype}.")
    elif array.dtype == np.uint64 and array.size and array.max() >= 2**63:
        raise ConfigError(f"vocabulary: names must be int64, got {array.max()}, a uint64.")
    return array.astype(np.int64)


def _encoded(given: list[Any]) -> list[bytes]:
    """Return names, bytes or str, as bytes: str in UTF-8."""
    if not set(map(type, given)) - {bytes}:
        return given
    try:
        given = [name.encode() if isinstance(name, str) else name for name in given]
    except UnicodeEncodeError as error:
        raise ConfigError(f"vocabulary: name {error.object!r} cannot be saved in UTF-8. Give its bytes.") from None
    for name in given:
        if not isinstance(name, bytes):
            raise ConfigError(f"vocabulary: a name must be str or bytes, got {name!r}, a {type(name).__name__}.")
    return given


def integers_in(path: Path) -> Names:
    """Return the integers of a .npy file, or of a text file with one a line.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has something else.
    """
    if path.suffix == ".npy":
        array = np.load(path, allow_pickle=False)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"it has an array of {array.dtype} {list(array.shape)}, not of integers [n]")
        if array.dtype.kind == "u" and len(array) and int(array.max()) >= 2**63:
            raise ValueError(f"it has {array.max()}, which is no int64")
        return array.astype(np.int64)
    values = list[int]()
    for line in _lines(path):
        try:
            values.append(int(line.replace(b"_", b".")))  # Python takes 1_0 for 10
        except ValueError:
            raise ValueError(f"it has {line!r}, which is no integer") from None
        if not -(2**63) <= values[-1] < 2**63:
            raise ValueError(f"it has {values[-1]}, which is no int64")
    return np.array(values, np.int64)


def names_in(path: Path) -> Names:
    """Return the names of a text file with one a line.

    Raises:
        OSError: the file cannot be read.
        ValueError: all lines end with CR LF, or it begins with a byte order mark.
    """
    lines = _lines(path)
    if lines and lines[0].startswith(_MARK):
        raise ValueError(
            "it begins with a byte order mark, which would be part of the first name. Save it as UTF-8 without one"
        )
    if lines and all(line.endswith(b"\r") for line in lines):
        raise ValueError("its lines end with CR LF, and names would end with CR. Convert it to lines that end with LF")
    return array_of(lines, "string")


def _lines(path: Path) -> list[bytes]:
    """Return the lines of a file without their ends. A last line without an end counts."""
    lines = path.read_bytes().split(b"\n")
    return lines[:-1] if not lines[-1] else lines


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
