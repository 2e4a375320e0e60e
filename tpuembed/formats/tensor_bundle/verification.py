"""Compares everything in a bundle with its checksums, piece by piece in bounded memory."""

import dataclasses
from collections.abc import Callable, Container, Iterator
from typing import Final

from tpuembed.errors import CheckpointError
from tpuembed.formats.tensor_bundle.reader import Bundle

__all__ = ["Damage", "damaged_parts", "unchecked_keys"]

_PIECE_BYTES: Final = 16 << 20
_VARIANT: Final = "variant"


@dataclasses.dataclass(frozen=True)
class Damage:
    """A tensor, or one of its slices, whose bytes do not match their checksum.

    Attributes:
        name: of the tensor.
        file: its data file.
        reason: the fault, in one line.
    """

    name: str
    file: str
    reason: str


def unchecked_keys(bundle: Bundle) -> list[str]:
    """Return the tensors whose kind of checksum is not supported."""
    return sorted(key for key, entry in bundle.entries.items() if entry.dtype == _VARIANT)


def damaged_parts(bundle: Bundle, on_read: Callable[[int], None], without: Container[str] = ()) -> Iterator[Damage]:
    """Read every data file, except for the tensors `without`, and yield what does not match its checksum.

    `on_read` is called with the number of bytes just read.
    """
    parts = [
        (part.shard, part.offset, key, part)
        for key, entry in bundle.entries.items()
        if entry.dtype != _VARIANT and key not in without
        for part in entry.parts()
    ]
    for shard, _, key, part in sorted(parts, key=lambda item: item[:3]):
        try:
            fault = bundle.fault(key, part, _PIECE_BYTES, on_read)
        except CheckpointError as error:
            fault = str(error)
        if fault is not None:
            yield Damage(key, str(bundle.data_path(shard)), fault)
