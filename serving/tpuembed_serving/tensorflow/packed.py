"""Runs named inputs through an export's signature `packed`, which takes one matrix and returns one.

This is faster: each named input costs as much as a lookup.
"""

from collections.abc import Callable, Sequence

import numpy as np

from tpuembed.manifest import Manifest, Packing
from tpuembed_serving.batching.concat import count_rows
from tpuembed_serving.core.servable import Array, Signature

__all__ = ["PackedCall", "is_worth_packing"]

_PADDING = -1  # see PackedInput of the manifest

Call = Callable[..., list[Array]]


def is_worth_packing(manifest: Manifest | None, signature: Signature) -> bool:
    """Returns True if the named `signature` has the outputs of `packed`, in one matrix.

    Features with names take them in `serving_default` alone.
    A whole model has its own outputs in both. It spends most of its time elsewhere, and neither is faster (measured).
    """
    return (
        manifest is not None
        and signature.name == "serving_default"
        and not manifest.packing.left_out
        and manifest.packing.outputs is not None
        and not any(feature.names for feature in manifest.features)
    )


class PackedCall:
    """Calls `packed` with the inputs of `serving_default`, and returns the outputs of `serving_default`."""

    def __init__(self, packing: Packing, signature: Signature, packed: Call, named: Call) -> None:
        """Prepare the calls. `named` is called with inputs that do not fit `packed`, so that its graph reports the error."""
        order = {info.alias: index for index, info in enumerate(signature.inputs)}
        self._fixed = [(order[one.name], one.columns) for one in packing.inputs if one.columns is not None]
        self._lists = [order[one.name] for one in packing.inputs if one.columns is None]
        places = {one.name: one for one in packing.outputs or ()}
        self._outputs = [places[info.alias] for info in signature.outputs]
        self._packed, self._named = packed, named

    def __call__(self, *inputs: Array) -> list[Array]:
        """Return the outputs in the signature's order."""
        matrix = self.matrix(inputs)
        if matrix is None:
            return self._named(*inputs)
        (activations,) = self._packed(matrix)
        return [activations[:, one.start : one.stop].reshape(len(matrix), *one.shape) for one in self._outputs]

    def matrix(self, inputs: Sequence[Array]) -> Array | None:
        """Return the inputs as one int64 matrix [rows, columns], or None if they do not fit."""
        rows = count_rows(inputs)
        if rows is None or not self._fits(inputs):
            return None
        parts = [inputs[index].reshape(rows, columns) for index, columns in self._fixed]
        parts += self._lists_of_one_width([inputs[index] for index in self._lists])
        return np.concatenate(parts, axis=1)

    def _fits(self, inputs: Sequence[Array]) -> bool:
        fixed = all(inputs[index].ndim == 1 + (columns != 1) for index, columns in self._fixed)
        return fixed and all(inputs[index].ndim == 2 for index in self._lists)

    def _lists_of_one_width(self, lists: Sequence[Array]) -> list[Array]:
        widest = max((array.shape[1] for array in lists), default=0)
        return [_padded(array, widest) for array in lists]


def _padded(array: Array, width: int) -> Array:
    missing = width - array.shape[1]
    return np.pad(array, ((0, 0), (0, missing)), constant_values=_PADDING) if missing else array
