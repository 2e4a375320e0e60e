"""Checks of an array's own metadata before a chunk is read."""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tpuembed.checkpoint.orbax.metadata import Leaf
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError

__all__ = ["check_form", "is_complete", "is_compressed", "keys_beyond"]

_MAX_ELEMENTS: Final = 1 << 58
"""The most elements of an array, so that byte and row numbers cannot overflow."""


def check_form(leaf: Leaf, handle: Any) -> None:
    """Raise an error unless the opened array has a form that Orbax writes, and the shape in its tree.

    Raises:
        CheckpointFormatError: its elements are in another order.
        CheckpointCorruptError: its shape is far too large, or not what was saved.
    """
    shape, order = tuple(handle.shape), tuple(handle.chunk_layout.inner_order or range(handle.rank))
    where = f"checkpoint {leaf.item.folder}: array {leaf.shown}"
    if math.prod(shape) > _MAX_ELEMENTS:
        raise CheckpointCorruptError.of(f"{where}: its shape {list(shape)} is far too large")
    if order != tuple(range(len(shape))) or _is_big_endian(handle):
        raise CheckpointFormatError(
            f"{where}: its metadata has column-major (Fortran) or big-endian chunks, which Orbax never writes. "
            "Restore it from another copy, or save it with Orbax."
        )
    if leaf.write_shape is not None and not _is_made_of(shape, leaf.write_shape):
        raise CheckpointCorruptError.of(
            f"{where}: is {list(shape)}, but by its tree it was written in parts of {list(leaf.write_shape)}, which do "
            "not add up to it"
        )


def _is_big_endian(handle: Any) -> bool:
    metadata = handle.spec().to_json()["metadata"]
    return str(metadata.get("dtype")).startswith(">") or '"endian": "big"' in json.dumps(metadata.get("codecs"))


def _is_made_of(shape: Sequence[int], part: Sequence[int]) -> bool:
    """Returns True if equal parts make up the whole, as JAX shards arrays.

    Source: `write_shape` is the shape of one shard (orbax/checkpoint/_src/serialization/types.py, ParamInfo).
    """
    if len(shape) != len(part):
        return False
    return all(whole % size == 0 if size > 0 else whole == size for whole, size in zip(shape, part, strict=True))


def is_complete(leaf: Leaf, handle: Any) -> bool:
    """Returns True if every chunk was written, so that a missing one was lost. Otherwise a missing chunk is the fill
    value.

    Versions of Orbax that do not record that they store all chunks left out zeros, but only if the array has a fill
    value:
    in zarr 2 it never had one (seen with orbax-checkpoint 0.5.23).
    """
    if leaf.item.complete:
        return True
    return not leaf.item.zarr3 and handle.spec().to_json()["metadata"].get("fill_value") is None


def is_compressed(handle: Any) -> bool:
    """Returns True if its chunks may be stored in another form than numbers in memory."""
    metadata = handle.spec().to_json()["metadata"]
    if "codecs" in metadata:
        return any(codec["name"] != "bytes" for codec in metadata["codecs"])
    return metadata["compressor"] is not None


def keys_beyond(handle: Any) -> Iterator[str]:
    """Yield the keys of the first chunk after the end of each dimension. If one exists, the array was larger."""
    metadata = handle.spec().to_json()["metadata"]
    if "chunk_grid" in metadata:  # zarr 3
        encoding, chunks = metadata["chunk_key_encoding"], metadata["chunk_grid"]["configuration"]["chunk_shape"]
        is_default = encoding["name"] == "default"
        separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
        prefix = f"c{separator}" if is_default else ""
    else:
        prefix, separator, chunks = "", metadata["dimension_separator"], metadata["chunks"]
    for axis, size in enumerate(handle.shape):
        place = ["0"] * len(chunks)
        place[axis] = str(-(-size // chunks[axis]))
        yield prefix + separator.join(place)
