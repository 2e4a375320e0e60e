"""Trees on disk as Orbax lays them out, written by TensorStore and by hand, so that each part can be spoilt."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

__all__ = ["STACKED", "Array", "Leaves", "metadata", "spec", "stacked_rows", "write_spec", "write_tree"]

Array = np.ndarray[Any, Any]
Leaves = Mapping[tuple[str, ...], Array]


def metadata(leaves: Leaves, *, ocdbt: bool = True, zarr3: bool = False) -> dict[str, Any]:
    """What Orbax 0.12 writes to `_METADATA`."""
    tree = {
        str(path): {
            "key_metadata": [{"key": key, "key_type": 2} for key in path],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": list(value.shape),
            },
        }
        for path, value in leaves.items()
    }
    return {
        "tree_metadata": tree,
        "use_ocdbt": ocdbt,
        "use_zarr3": zarr3,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def write_tree(
    folder: Path,
    leaves: Leaves,
    *,
    chunks: tuple[int, ...] | None = None,
    ocdbt: bool = True,
    zarr3: bool = False,
    compressed: bool = True,
) -> Path:
    """An item of Orbax at `folder`; `chunks`: of every matrix."""
    folder.mkdir(parents=True)
    for path, value in leaves.items():
        key = ".".join(path)
        store: dict[str, Any] = {"driver": "file", "path": f"{folder}/{'' if ocdbt else key + '/'}"}
        if ocdbt:
            config = {"max_inline_value_bytes": 16, **({} if compressed else {"compression": None})}
            store = {"driver": "ocdbt", "base": store, "path": f"{key}/", "config": config}
        shape = list(chunks or value.shape) if value.ndim == 2 else list(value.shape)
        layout = _zarr3(shape, compressed) if zarr3 else _zarr2(shape, compressed)
        spec = {
            "driver": "zarr3" if zarr3 else "zarr",
            "kvstore": store,
            "metadata": {"shape": list(value.shape), **layout},
            "dtype": value.dtype.name,
            "store_data_equal_to_fill_value": True,
        }
        tensorstore.open(spec, create=True, delete_existing=True).result().write(value).result()
    (folder / "_METADATA").write_text(json.dumps(metadata(leaves, ocdbt=ocdbt, zarr3=zarr3)))
    return folder


def _zarr2(chunks: list[int], compressed: bool) -> dict[str, Any]:
    return {"chunks": chunks, "compressor": {"id": "zstd", "level": 1} if compressed else None}


def _zarr3(chunks: list[int], compressed: bool) -> dict[str, Any]:
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    codecs += [{"name": "zstd", "configuration": {"level": 1}}] if compressed else []
    return {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}}, "codecs": codecs}


STACKED = {"a": (19, 3), "b": (8, 5), "c": (1, 8)}
"""Tables of one stack, 8 wide, on 4 SparseCores: [rows, dim] by name."""
_CORES, _DIM, _ROTATION = 4, 8, 2


def spec() -> dict[str, Any]:
    """How `stacked_rows` stacks them, as a user says it."""
    tables, offset = {}, 0
    for number, (name, (rows, dim)) in enumerate(STACKED.items()):
        tables[name] = {
            "vocab_size": rows,
            "embedding_dim": dim,
            "row_offset_in_shard": offset,
            "shard_rotation": number * _ROTATION % _CORES,
        }
        offset += -(-rows // _CORES)
    return {"a_b_c": {"num_sparsecores": _CORES, "tables": tables}}


def stacked_rows(values: Mapping[str, Array]) -> Array:
    """The stack, element by element, padded with NaN."""
    stack = spec()["a_b_c"]
    per_core = sum(-(-rows // _CORES) for rows, _ in STACKED.values())
    rows = np.full((_CORES * per_core, _DIM), np.nan, np.float32)
    for name, table in stack["tables"].items():
        for row, value in enumerate(values[name]):
            core = (row % _CORES + table["shard_rotation"]) % _CORES
            rows[core * per_core + table["row_offset_in_shard"] + row // _CORES, : value.size] = value
    return rows


def write_spec(path: Path, stacks: Mapping[str, Any]) -> Path:
    """`stacks` as the text of an EmbeddingSpecProto."""
    lines = []
    for name, stack in stacks.items():
        lines += ["stacked_table_specs {", f'  stack_name: "{name}"', f"  num_sparsecores: {stack['num_sparsecores']}"]
        for table, numbers in stack["tables"].items():
            lines += ["  table_specs {", f'    table_name: "{table}"']
            lines += [f"    {key}: {number}" for key, number in numbers.items() if number]
            lines.append("  }")
        lines.append("}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path
