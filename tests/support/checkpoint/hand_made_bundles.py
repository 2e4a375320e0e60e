"""Bundles of SparseCore stacks whose data file is a hole."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.sparse_core_files import LAYOUTS_KEY, TABLE_KEY, object_graph
from tests.support.checkpoint.strings import encode_strings
from tests.support.checkpoint.tpu_checkpoints import serialized_layouts
from tpuembed.formats.tensor_bundle import Entry, index_path, shard_path, write_index


def write_stack(prefix: Path, layout: Mapping[str, Any]) -> None:
    """One float32 stack of the size that its `layout` says, called "table" in the object graph."""
    rows = layout["num_sparse_cores"] * layout["total_rows_per_sparse_core_shard"]
    dim = layout["unsharded_padded_shape"][1]
    entries, data = {TABLE_KEY: Entry(dtype="float32", shape=(rows, dim), size=4 * rows * dim)}, b""
    strings = {
        LAYOUTS_KEY: serialized_layouts(layout),
        "_CHECKPOINTABLE_OBJECT_GRAPH": object_graph(layout["stacked_table_name"]),
    }
    for key, text in strings.items():
        payload, crc32c = encode_strings([text])
        entries[key] = Entry(dtype="string", shape=(), shard=1, offset=len(data), size=len(payload), crc32c=crc32c)
        data += payload
    with open(shard_path(prefix, 0, 2), "wb") as file:
        file.truncate(4 * rows * dim)
    shard_path(prefix, 1, 2).write_bytes(data)
    write_index(index_path(prefix), entries, 2)
