"""How requests of a signature are concatenated, if they may be: their shapes and padding.

Whether they may be is decided in `queue.BatchQueue.of`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from tpuembed.manifest import FeatureEntry, Manifest
from tpuembed.native_search import EXCLUDE
from tpuembed_serving.core.servable import Merging, Signature

__all__ = ["find_merging", "with_padding"]

_PADDING: Final = -1
"""The padding of lists of ids, and of integers that are names, in every export of lookups."""

Shape = Sequence[int] | None
"""A shape of a signature: -1 is an unknown size, and None an unknown rank."""


def find_merging(
    signature: Signature,
    shapes: Sequence[Shape],
    manifest: Manifest | None,
    *,
    is_proven: bool,
    is_steady: bool,
) -> Merging | None:
    """Return how requests of `signature` are batched, or None if they cannot be.

    Args:
        signature: the signature, as `with_padding` returns it.
        shapes: the shapes of all inputs, then of all outputs. The first size of each must be unknown.
        manifest: the manifest of an export.
        is_proven: whether the graph proves that rows are independent.
        is_steady: whether the duration of a run depends only on shapes, unless inputs are strings.
    """
    if not signature.inputs or not all(shape is None or (len(shape) > 0 and shape[0] == -1) for shape in shapes):
        return None
    is_numeric = all(info.dtype != "string" for info in signature.inputs)
    is_lookups = manifest is not None and bool(manifest.features) and signature.name == "serving_default"
    return Merging(
        is_proven=is_proven,
        shapes=tuple(None if shape is None else tuple(shape[1:]) for shape in shapes[: len(signature.inputs)]),
        is_steady=is_steady and is_numeric,
        padding=signature.padding if is_lookups else (),
    )


def with_padding(signature: Signature, manifest: Manifest | None) -> Signature:
    """Return `signature` with the padding of the inputs that the manifest of an export lists.

    For a whole model, this does not allow to batch requests of different widths: a model may depend on the width.
    """
    if manifest is None or (manifest.retrieval is None and signature.name != "serving_default"):
        return signature
    features = {feature.name: feature for feature in manifest.features}
    weights = {f"{feature.name}_weights": feature for feature in manifest.features if feature.weighted}
    of_models = {name: math.nan if value == "NaN" else value for name, value in manifest.padding.items()}
    if manifest.retrieval is not None and signature.name == "filtered":
        of_models[EXCLUDE] = _PADDING if manifest.retrieval.ids == "int64" else ""
    padding = tuple(
        of_models.get(info.alias, _padding(features.get(info.alias), weights.get(info.alias)))
        for info in signature.inputs
    )
    return dataclasses.replace(signature, padding=padding)


def _padding(ids: FeatureEntry | None, weights: FeatureEntry | None) -> int | str | None:
    if ids is not None and ids.input == "ids":
        return "" if ids.names == "string" else _PADDING
    if ids is not None:
        return None
    return 0 if weights is not None and weights.input == "ids" else None
