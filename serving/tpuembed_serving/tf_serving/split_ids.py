"""Checks the ids of tables whose rows are on several shards: each shard takes the ids of others' rows as zeros."""

import numpy as np

from tpuembed.id_messages import Span, outside_message
from tpuembed_serving.core.servable import Array
from tpuembed_serving.core.shards_file import SplitLookup
from tpuembed_serving.core.status import Code, StatusError

__all__ = ["check_ids"]


def check_ids(name: str, feature: SplitLookup, named: dict[str, Array]) -> None:
    """Check the ids of a feature of a split table, and replace those that become others.

    Raises:
        StatusError: INVALID_ARGUMENT, the input has another rank, or an id is outside the table.
    """
    ids = named[name]
    if ids.ndim == 0 or (feature.input == "ids" and ids.ndim != 2):
        wanted = "an id" if feature.input == "id" else "a list of ids"
        raise StatusError(
            Code.INVALID_ARGUMENT, f"input {name} has shape {list(ids.shape)}. Send {wanted} for each example"
        )
    weights = named[f"{name}_weights"] if feature.weighted else None
    if weights is not None and weights.shape != ids.shape:
        shapes = f"{name}_weights has shape {list(weights.shape)}, but {name} has {list(ids.shape)}"
        text = f"input {shapes}. Send one weight for each id"
        raise StatusError(Code.INVALID_ARGUMENT, text)
    if feature.drops_negative and (negative := ids < -1).any():
        named[name] = ids = np.where(negative, ids.dtype.type(-1), ids)
        if weights is not None:
            named[f"{name}_weights"] = np.where(negative, np.float32(0), weights)
    if feature.out_of_vocabulary == "zeros":
        return
    outside = (ids < 0) | (ids >= feature.rows)
    if feature.input == "ids":
        outside &= ids != -1
    if feature.max_sequence_length and ids.ndim > 1:
        outside[:, feature.max_sequence_length :] = False
    if not outside.any():
        return
    if feature.out_of_vocabulary != "error":
        named[name] = np.where(outside, ids.dtype.type(feature.out_of_vocabulary), ids)
        return
    first = tuple(np.argwhere(outside)[0])
    text = outside_message(name, Span(feature.table, 0, feature.rows), int(ids[first]), int(first[0]))
    raise StatusError(Code.INVALID_ARGUMENT, text)
