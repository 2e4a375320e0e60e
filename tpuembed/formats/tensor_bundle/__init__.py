"""Reads and writes TensorFlow's tensor bundles, the container of its checkpoints and SavedModel variables, without TensorFlow.

`PREFIX.index` maps names of tensors to entries; `PREFIX.data-SSSSS-of-NNNNN` have the bytes, which are read by range.
"""

from tpuembed.formats.tensor_bundle import crc
from tpuembed.formats.tensor_bundle.entries import Entry, Slice
from tpuembed.formats.tensor_bundle.index import (
    BundleIndex,
    index_path,
    merge_entries,
    read_index,
    shard_path,
    write_index,
)
from tpuembed.formats.tensor_bundle.reader import Bundle

__all__ = [
    "Bundle",
    "BundleIndex",
    "Entry",
    "Slice",
    "crc",
    "index_path",
    "merge_entries",
    "read_index",
    "shard_path",
    "write_index",
]
