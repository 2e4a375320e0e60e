"""Partitioned variables of TensorFlow 1."""

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support.checkpoint.bundles import save

TABLE = np.arange(22, dtype=np.float32).reshape(11, 2)


def partitioned(folder: Path, *cuts: str, table: np.ndarray[Any, Any] = TABLE) -> Path:
    """Variable "emb" in slices such as "0,6:-"."""
    parts = []
    for number, spec in enumerate(cuts):
        rows, columns = (
            slice(None) if part == "-" else slice(int(part.split(",")[0]), sum(map(int, part.split(","))))
            for part in spec.split(":")
        )
        parts.append(
            save(
                folder / f"part{number}",
                {"emb": table[rows, columns]},
                {"emb": f"{len(table)} {table.shape[1]} {spec}"},
            )
        )
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=str(folder / "ckpt"))
    return folder / "ckpt"
