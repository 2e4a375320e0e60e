"""The number of updates of the tpuembed layers in a checkpoint, from which learning rate schedules resume."""

from typing import Any, Final

import numpy as np

from tpuembed.checkpoint.bundle.checkpoint import BundleCheckpoint
from tpuembed.checkpoint.bundle.own_layer import own_layer_configs
from tpuembed.checkpoint.keras import KerasCheckpoint
from tpuembed.checkpoint.types import Checkpoint
from tpuembed.errors import CheckpointCorruptError

__all__ = ["update_counts"]

_ATTRIBUTE: Final = "tpuembed_iterations"


def update_counts(checkpoint: Checkpoint) -> dict[str, int]:
    """Return table name -> the count of the layer that has it, for tables whose layer wrote one.

    Raises:
        CheckpointCorruptError: a count is not one integer, or is negative.
    """
    if isinstance(checkpoint, BundleCheckpoint):
        return _in_bundle(checkpoint)
    if isinstance(checkpoint, KerasCheckpoint):
        return {table: _checked(checkpoint.path, count) for table, count in checkpoint.update_counts().items()}
    return {}


def _in_bundle(checkpoint: BundleCheckpoint) -> dict[str, int]:
    bundle, graph = checkpoint.bundle, checkpoint.graph
    counts: dict[str, int] = {}
    for number, config in own_layer_configs(bundle, graph).items() if graph else ():
        attribute = graph.nodes[number].attributes.get(_ATTRIBUTE) if graph else None
        if attribute is not None and attribute.checkpoint_key in bundle.entries:
            count = _checked(checkpoint.path, bundle.read(attribute.checkpoint_key))
            counts.update(dict.fromkeys(config["tables"], count))
    return counts


def _checked(path: str, count: Any) -> int:
    found = np.asarray(count)
    if found.shape or found.dtype != np.int64 or found < 0:
        raise CheckpointCorruptError.of(
            f"checkpoint {path}: a layer's count of updates is {found.dtype} {list(found.shape)} {found}"
        )
    return int(found)
