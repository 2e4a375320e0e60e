"""Weight files as Keras lays them out, written by hand, so that each part can be spoilt."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

__all__ = ["LAYER", "add_table", "write_archive", "write_tables"]

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
