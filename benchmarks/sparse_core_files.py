"""Checkpoints of one SparseCore table of any size, without its bytes: index, object graph and layouts, by hand.

No TensorFlow, and nothing of the readers: field by field from trackable_object_graph.proto and sparse_core_layout.proto.
"""

from collections.abc import Sequence
from pathlib import Path

from tests.support.checkpoint.strings import encode_strings
from tpuembed.formats.protobuf import bytes_field, varint, varint_field
from tpuembed.formats.tensor_bundle import Entry, Slice, index_path, shard_path, write_index

__all__ = ["LAYOUTS_KEY", "TABLE_KEY", "object_graph", "write_sparse_core_checkpoint"]

SPARSE_CORES_PER_DEVICE = 4
TABLE_KEY = "layer/table/.ATTRIBUTES/VARIABLE_VALUE"
LAYOUTS_KEY = "layer/_sparse_core_table_layouts/.ATTRIBUTES/VARIABLE_VALUE"


def write_sparse_core_checkpoint(
    prefix: Path, rows: int, dim: int, sparse_cores: int, checksums: Sequence[int] | None = None
) -> int:
    """Write `prefix`.index and data file 1 of 2; its float32 table "table", [rows, dim], has no padding.

    The bytes of the table, so many as are returned, belong into data file 0 from its start, SparseCore by SparseCore.
    `checksums` are their CRC32C, device by device, which TensorFlow and exports ask for.
    """
    if rows % (8 * sparse_cores) or dim % 8:
        raise ValueError(f"[{rows}, {dim}] would be padded on {sparse_cores} SparseCores")
    devices = sparse_cores // SPARSE_CORES_PER_DEVICE
    step, row_bytes = rows // devices, 4 * dim
    slices = tuple(
        Slice(
            start=(step * device, 0),
            shape=(step, dim),
            shard=0,
            offset=step * row_bytes * device,
            size=step * row_bytes,
            crc32c=checksums[device] if checksums else 0,
        )
        for device in range(devices)
    )
    strings = {LAYOUTS_KEY: _layouts(rows, dim, sparse_cores, devices), "_CHECKPOINTABLE_OBJECT_GRAPH": object_graph()}
    entries, data = {TABLE_KEY: Entry(dtype="float32", shape=(rows, dim), slices=slices)}, b""
    for key, text in strings.items():
        payload, crc32c = encode_strings([text])
        entries[key] = Entry(dtype="string", shape=(), shard=1, offset=len(data), size=len(payload), crc32c=crc32c)
        data += payload
    shard_path(prefix, 1, 2).write_bytes(data)
    write_index(index_path(prefix), entries, 2)
    return rows * row_bytes


def _layouts(rows: int, dim: int, sparse_cores: int, devices: int) -> bytes:
    shape = bytes_field(6, varint(rows) + varint(dim)) + bytes_field(7, varint(rows) + varint(dim))
    numbers = varint_field(3, sparse_cores) + varint_field(4, devices) + varint_field(5, rows // sparse_cores)
    return bytes_field(1, bytes_field(1, b"table") + bytes_field(2, b"table") + numbers + shape)


def object_graph(stack: str = "table") -> bytes:
    """Root -> layer -> its configs, its variables, the stack and the layouts."""
    nodes = [
        {"layer": 1},
        {"_feature_config": 2, "_table_config": 2, "_variables": 3, stack: 5, "_sparse_core_table_layouts": 6},
        {},
        {stack: 4},
        {"parameters": 5},
        {},
        {},
    ]
    keys = {5: TABLE_KEY, 6: LAYOUTS_KEY}
    return b"".join(bytes_field(1, _node(children, keys.get(number))) for number, children in enumerate(nodes))


def _node(children: dict[str, int], key: str | None) -> bytes:
    encoded = b"".join(
        bytes_field(1, varint_field(1, number) + bytes_field(2, name.encode())) for name, number in children.items()
    )
    if key is None:
        return encoded
    return encoded + bytes_field(2, bytes_field(1, b"VARIABLE_VALUE") + bytes_field(3, key.encode()))
