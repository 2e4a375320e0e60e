"""TensorFlow's tensor bundle, the container of its checkpoints and SavedModel variables, without TensorFlow.

`PREFIX.index` maps tensor names to entries; `PREFIX.data-SSSSS-of-NNNNN` have the bytes. One concern per module:

    ordered_code, crc, dtypes          encodings (protocol buffers: `tpuembed.protobuf`)
    sstable, strings                   the two file layouts
    entries, tiling                    the index entry of a tensor, and the check that its slices cover it
    index                              index files, read and written whole
    data_files, reader                 bundles, read by byte range
    crc_pieces, verification           checksums of pieces, and of everything in a bundle
"""

from tpuembed.tensor_bundle import crc
from tpuembed.tensor_bundle.entries import Entry, Slice
from tpuembed.tensor_bundle.index import (
    BundleIndex,
    index_path,
    merge_entries,
    read_index,
    shard_path,
    write_index,
)
from tpuembed.tensor_bundle.reader import Bundle
from tpuembed.tensor_bundle.strings import encode_strings

__all__ = [
    "Bundle",
    "BundleIndex",
    "Entry",
    "Slice",
    "crc",
    "encode_strings",
    "index_path",
    "merge_entries",
    "read_index",
    "shard_path",
    "write_index",
]
