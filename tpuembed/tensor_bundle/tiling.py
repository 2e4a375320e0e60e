"""Checks that slices tile a tensor: no hole, no overlap, in any number of dimensions."""

import itertools
import math
from collections.abc import Sequence
from typing import Final

from tpuembed.protobuf import MalformedError, UnsupportedError
from tpuembed.tensor_bundle.entries import Slice

__all__ = ["HolesError", "check_tiling"]

_MAX_CUT_DIMS: Final = 8


class HolesError(MalformedError):
    """Slices have fewer elements than their tensor."""


def check_tiling(shape: tuple[int, ...], slices: Sequence[Slice]) -> None:
    """Raise MalformedError unless the boxes `slices`, each inside `shape`, cover every element exactly once.

    Raises HolesError if they have too few elements.

    Remove corners that coincide in pairs. A set of boxes covers exactly the elements of one box an odd number of times
    if and only if the corners of that box are left. If the volumes also add up, "odd" is "once". This takes time linear
    in the number of slices, in any arrangement.
    """
    held, volume = sum(math.prod(piece.shape) for piece in slices), math.prod(shape)
    if held < volume:
        raise HolesError(f"its {len(slices)} slices leave holes: {held} elements of {volume}")
    if held > volume:
        raise MalformedError(f"its {len(slices)} slices overlap: {held} elements of {volume}")
    cut = [dim for dim, size in enumerate(shape) if any(piece.shape[dim] != size for piece in slices)]
    if len(cut) > _MAX_CUT_DIMS:
        raise UnsupportedError(f"its slices cut {len(cut)} dimensions")
    corners = _corners([0] * len(shape), shape, cut)
    for piece in slices:
        corners ^= _corners(piece.start, piece.shape, cut)
    if corners:
        raise MalformedError(f"its {len(slices)} slices overlap and leave holes, near {list(min(corners))}")


def _corners(start: Sequence[int], shape: Sequence[int], cut: Sequence[int]) -> set[tuple[int, ...]]:
    """Return the box's corners in the dimensions `cut`, without those that coincide."""
    if any(shape[dim] == 0 for dim in cut):
        return set()
    return set(itertools.product(*((start[dim], start[dim] + shape[dim]) for dim in cut)))
