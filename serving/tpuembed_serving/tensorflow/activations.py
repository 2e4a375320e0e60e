"""Looks up the features of a whole model by the C library, for its signature `from_activations`."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from tpuembed.manifest import ActivationEntry, Manifest, Packing
from tpuembed.native.lookup import NativeLookups
from tpuembed_serving.core.servable import Array

__all__ = ["NativeActivations", "of_lookups"]

_PADDING: Final = {"": -1, "int64": -1, "string": b""}
"""By the type of the names; "" is row numbers."""
_LEAST_WEIGHT: Final = 1e-18
"""The square of a smaller float32 may become 0."""


class NativeActivations:
    """The activations of a whole model's features, of the inputs of its `serving_default`."""

    def __init__(self, manifest: Manifest, version_dir: Path, *, threads: int | None = None) -> None:
        """Map the tables of the export at `version_dir`. See `NativeLookups`.

        Raises:
            ConfigError: as `NativeLookups`.
        """
        self._shapes = {
            name: spec.shape or () for name, spec in manifest.signatures["serving_default"]["inputs"].items()
        }
        parts: dict[tuple[object, ...], list[ActivationEntry]] = {}
        for one in manifest.from_activations.features:
            parts.setdefault(self._part_of(one), []).append(one)
        self._parts = [
            (part, NativeLookups(of_lookups(manifest, part), version_dir, threads=threads, divides_weights=True))
            for part in parts.values()
        ]

    def _part_of(self, feature: ActivationEntry) -> tuple[object, ...]:
        """Return a key that features share if a request has the same number of lookups for each. A list is one lookup."""
        sizes = self._shapes[feature.ids][1:] if feature.input == "id" else ()
        return feature.name if None in sizes else "", *sizes

    @property
    def reads_ahead(self) -> bool:
        """See `NativeLookups`."""
        return self._parts[0][1].reads_ahead

    @reads_ahead.setter
    def reads_ahead(self, reads_ahead: bool) -> None:
        for _, lookups in self._parts:
            lookups.reads_ahead = reads_ahead

    @property
    def lists_share(self) -> float:
        """Return the share of features that are lists."""
        features = [one for part, _ in self._parts for one in part]
        return sum(one.input == "ids" for one in features) / len(features)

    def look_up(self, inputs: Mapping[str, Array]) -> dict[str, Array] | None:
        """Return the activations by feature. Returns None if only the graph knows what these inputs mean.

        Raises:
            ConfigError: an id is outside its table, a name is unknown, or an input does not fit.
            TpuEmbedError: an overlay is damaged.
        """
        found: dict[str, Array] = {}
        for part, lookups in self._parts:
            given: dict[str, Array] = {}
            for one in part:
                ids = inputs[one.ids]
                if not _fits(ids, self._shapes[one.ids]):
                    return None
                if one.names != "string":
                    ids = ids.astype(np.int64, copy=False)
                given[one.name] = ids.reshape(-1) if one.input == "id" else ids
                if one.weighted:
                    weights = inputs[one.weights]
                    if not _are_plain(ids != _PADDING[one.names], weights, one.combiner):
                        return None
                    given[f"{one.name}_weights"] = weights
            for one, rows in zip(part, lookups.named(given).values(), strict=True):
                found[one.name] = rows.reshape(*inputs[one.ids].shape, rows.shape[-1]) if one.input == "id" else rows
        return found


def of_lookups(manifest: Manifest, features: Sequence[ActivationEntry]) -> Manifest:
    """Return the manifest of an export of these lookups, of the same tables."""
    return dataclasses.replace(
        manifest, features=tuple(features), packing=Packing(left_out="the export is a whole model")
    )


def _fits(array: Array, shape: Sequence[int | None]) -> bool:
    sizes = zip(array.shape, shape, strict=False)
    return array.ndim == len(shape) and all(wanted in (None, size) for size, wanted in sizes)


def _are_plain(present: Array, weights: Array, combiner: str) -> bool:
    """Return True if every id that is `present` has an ordinary weight, and no id or weight stands behind the end of a list.

    The graph has rules for other weights, of which some are errors. Weights that could add up to 0, or whose squares could, are
    not ordinary: what a division by their sum gives depends on the order of the additions.
    """
    if weights.shape != present.shape:
        return False
    rest, own = weights[~present], weights[present]
    if not (own >= _LEAST_WEIGHT if combiner != "sum" else (own == 0) | (np.abs(own) >= _LEAST_WEIGHT)).all():
        return False
    is_in_order = not (present[:, 1:] & ~present[:, :-1]).any()
    return bool(is_in_order and np.isfinite(weights[present]).all() and (np.isnan(rest) | (rest == 0)).all())
