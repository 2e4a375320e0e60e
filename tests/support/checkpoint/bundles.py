"""Bundles written for tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support.checkpoint.strings import encode_strings
from tpuembed.checkpoint import Checkpoint
from tpuembed.formats.tensor_bundle import BundleIndex, Entry, crc, index_path, shard_path, write_index

Array = np.ndarray[Any, Any]


def save(prefix: Path, tensors: Mapping[str, Any], specs: Mapping[str, str] | None = None) -> str:
    """Have TensorFlow write `tensors`; `specs` gives slice specs such as "4 2 0,2:0,2"."""
    names = list(tensors)
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=names,
        shape_and_slices=[(specs or {}).get(name, "") for name in names],
        tensors=[tf.convert_to_tensor(tensors[name]) for name in names],
    )
    return str(prefix)


def restore(prefix: Path | str, name: str, dtype: str, spec: str = "") -> Array:
    """What TensorFlow reads."""
    [tensor] = tf.raw_ops.RestoreV2(prefix=str(prefix), tensor_names=[name], shape_and_slices=[spec], dtypes=[dtype])
    array: Array = tensor.numpy()
    return array


def write(prefix: Path, arrays: Mapping[str, Array]) -> BundleIndex:
    """One data file and its index, by our writer; strings are object arrays of bytes."""
    entries, data = {}, b""
    for name, array in arrays.items():
        payload = array.tobytes()
        checksum = crc.value(payload)
        if array.dtype == object:
            payload, checksum = encode_strings(array.reshape(-1).tolist())
        entries[name] = Entry(
            dtype="string" if array.dtype == object else array.dtype.name,
            shape=array.shape,
            offset=len(data),
            size=len(payload),
            crc32c=checksum,
        )
        data += payload
    shard_path(prefix, 0, 1).write_bytes(data)
    write_index(index_path(prefix), entries, 1)
    return BundleIndex(entries, 1)


def recorded(checkpoint: Checkpoint, table: str) -> int | None:
    """The CRC32C that the files record of the rows of a table in order."""
    assert checkpoint.checksums is not None
    return checkpoint.checksums.recorded(table)
