"""Compares everything in a bundle with its checksums, piece by piece in bounded memory."""

import dataclasses
from collections.abc import Callable, Container, Iterator
from typing import Final

from tpuembed.errors import CheckpointError
from tpuembed.tensor_bundle.reader import Bundle

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
    places = {key: min((part.shard, part.offset) for part in entry.parts()) for key, entry in bundle.entries.items()}
    for key in sorted(places, key=places.__getitem__):
        if bundle.entries[key].dtype == _VARIANT or key in without:
            continue
        try:
            for shard, fault in bundle.faults(key, _PIECE_BYTES, on_read):
                yield Damage(key, str(bundle.data_path(shard)), fault)
        except CheckpointError as error:
            yield Damage(key, str(bundle.data_path(places[key][0])), str(error))
