"""What is known of a SavedModel about requests that share a run: from its graph, and from the manifest of an export."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Final

from tpuembed.manifest import FeatureEntry, Manifest
from tpuembed_serving.batching.parameters import BatchingParameters
from tpuembed_serving.core.servable import IdRange, Merging, Signature

__all__ = ["find_merging", "with_padding"]

_PADDING: Final = -1
"""Of lists of ids, in every export of lookups."""

Shape = Sequence[int] | None
"""As a signature has it: -1 is an unknown size, and None an unknown rank."""


def find_merging(
    signature: Signature,
    shapes: Sequence[Shape],
    manifest: Manifest | None,
    parameters: BatchingParameters | None,
    *,
    is_proven: bool,
    is_steady: bool,
) -> Merging | None:
    """How requests of `signature` may share a run; None where they may not.

    Args:
        shapes: of all its inputs and outputs, inputs first. The first size of each must be left open.
        manifest: of an export.
        parameters: of this model alone.
        is_proven: whether its graph proves that rows do not depend on each other.
        is_steady: whether the time of a run depends on shapes alone. That of strings depends on what is in them.
    """
    if not signature.inputs or not all(shape is None or (len(shape) > 0 and shape[0] == -1) for shape in shapes):
        return None
    is_numeric = all(info.dtype != "string" for info in signature.inputs)
    merging = Merging(
        is_proven=is_proven,
        shapes=tuple(None if shape is None else tuple(shape[1:]) for shape in shapes[: len(signature.inputs)]),
        is_steady=is_steady and is_numeric,
        parameters=parameters,
    )
    return _of_lookups(merging, signature, manifest) if manifest is not None and manifest.features else merging


def with_padding(signature: Signature, manifest: Manifest | None) -> Signature:
    """`signature` with what fills up the rows of its inputs that an export says are lists.

    What it says of a whole model is not enough to put requests of different widths together: a model may look at the width.
    """
    if manifest is None or signature.name != "serving_default":
        return signature
    features = {feature.name: feature for feature in manifest.features}
    weights = {f"{feature.name}_weights": feature for feature in manifest.features if feature.weighted}
    of_models = {name: math.nan if value == "NaN" else value for name, value in manifest.padding.items()}
    padding = tuple(
        of_models.get(info.alias, _padding(features.get(info.alias), weights.get(info.alias)))
        for info in signature.inputs
    )
    return dataclasses.replace(signature, padding=padding)


def _of_lookups(merging: Merging, signature: Signature, manifest: Manifest) -> Merging:
    """What its lists may be padded with, and which ids it accepts."""
    if signature.name != "serving_default":
        return merging
    features = {feature.name: feature for feature in manifest.features}
    weights = {f"{feature.name}_weights": feature for feature in manifest.features if feature.weighted}
    stops = {table.name: table.first_row + table.rows for table in manifest.tables}
    aliases = [info.alias for info in signature.inputs]
    return dataclasses.replace(
        merging,
        padding=tuple(_padding(features.get(alias), weights.get(alias)) for alias in aliases),
        id_ranges=tuple(_id_range(features.get(alias), stops) for alias in aliases),
    )


def _padding(ids: FeatureEntry | None, weights: FeatureEntry | None) -> int | None:
    if ids is not None:
        return _PADDING if ids.input == "ids" else None
    return 0 if weights is not None and weights.input == "ids" else None


def _id_range(feature: FeatureEntry | None, stops: Mapping[str, int]) -> IdRange | None:
    """Not too narrow: of a table that starts above 0, ids below its start are found to fail only when they do."""
    if feature is None or feature.out_of_vocabulary != "error":
        return None
    return IdRange(_PADDING if feature.input == "ids" else 0, stops[feature.table])
