"""Weight files as Keras lays them out, written by hand, so that each part can be spoilt."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

__all__ = ["LAYER", "add_table", "write_archive", "write_sparse_table", "write_tables"]

Array = np.ndarray[Any, Any]
LAYER = "layers/distributed_embedding"


def write_tables(path: Path, tables: Mapping[str, Array], **options: Any) -> Path:
    """The file of a model with one keras-rs layer; `options` are h5py's for every matrix."""
    with h5py.File(path, "w") as file:
        file.create_group(f"{LAYER}/vars").attrs["name"] = "de"
        for number, (name, rows) in enumerate(tables.items()):
            add_table(file, number, name, rows, **options)
    return path


def add_table(file: Any, number: int, name: str | None, rows: Array, **options: Any) -> Any:
    """Table number `number` of the layer; without a name where that is None."""
    suffix = f"_{number}" if number else ""
    group = file.create_group(f"{LAYER}/_default_device_embedding_layers/embed_reduce{suffix}/vars")
    if name is not None:
        group.attrs["name"] = name
    is_bfloat16 = rows.dtype.name == "bfloat16"
    dataset = group.create_dataset("0", data=rows.view("V2") if is_bfloat16 else rows, **options)
    if is_bfloat16:
        dataset.attrs["dtype"] = "bfloat16"
    return dataset


def write_archive(
    path: Path,
    weights: Path | None,
    config: Any = None,
    compression: int = zipfile.ZIP_STORED,
    more: Mapping[str, bytes] | None = None,
) -> Path:
    """A `.keras` file of `weights`, with `more` files."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", json.dumps({} if config is None else config))
        if weights is not None:
            archive.write(weights, "model.weights.h5")
        for name, data in (more or {}).items():
            archive.writestr(name, data)
    return path


def write_sparse_table(path: Path, name: str, rows: int, last: Any) -> Path:
    """A table of keras-rs with `last` in its last row. The others are a hole in the file, which takes no disk."""
    with h5py.File(path, "w") as file:
        add_table(file, 0, name, np.zeros((1, 1), np.float32))
        group = file[f"{LAYER}/_default_device_embedding_layers/embed_reduce/vars"]
        del group["0"]
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((rows, len(last)))
        h5py.h5d.create(group.id, b"0", h5py.h5t.IEEE_F32LE, space, properties)
        end = group["0"].id.get_offset() + rows * last.nbytes
    with open(path, "r+b") as file:
        file.seek(end - last.nbytes)
        file.write(last.tobytes())
    return path
