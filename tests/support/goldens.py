"""The checkpoints under tests/golden, and what they hold by whoever wrote them."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

__all__ = ["BUNDLES", "FOLDER", "Golden", "read_golden"]

FOLDER: Final = Path(__file__).parents[1] / "golden"

BUNDLES: Final[Mapping[str, str]] = {
    "dense": "tfrs/adam_lookups",
    "own_layer": "tensorflow/own_layer",
    "saved_model": "tensorflow/saved_model",
    "tpu_v1": "tpu/hosts_2_adagrad",
    "sparsecore": "tpu/sparse_cores_2_adagrad_momentum",
    "partitioned": "tpu/partitioned_mod",
    "keras_rs_checkpoint": "keras_rs/checkpoint_adam",
}
"""A golden of every format that is a tensor bundle."""


@dataclasses.dataclass(frozen=True)
class Golden:
    """Where a checkpoint lies, the options that open it, and its tables: name -> slot, or None for the table -> rows."""

    path: Path
    options: Mapping[str, Any]
    tables: Mapping[str, Mapping[str | None, "np.ndarray[Any, Any]"]]


def read_golden(name: str) -> Golden:
    """The golden of a path below tests/golden."""
    folder = FOLDER / name
    truth = json.loads((folder / "truth.json").read_text())
    options = {
        option: str(folder / value) if (folder / value).is_file() else value
        for option, value in truth.get("options", {}).items()
    }
    tables = {table: _tables(folder, files) for table, files in truth["tables"].items()}
    return Golden(folder / truth.get("checkpoint", "model"), options, tables)


def _tables(folder: Path, files: Mapping[str, Any]) -> dict[str | None, "np.ndarray[Any, Any]"]:
    rows = np.load(folder / files["rows"])
    parameters = rows.astype(ml_dtypes.bfloat16) if files.get("dtype") == "bfloat16" else rows
    return {None: parameters, **{slot: np.load(folder / file) for slot, file in files["slots"].items()}}
