"""A bundle's index file: read, written, and merged with others."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final, overload

from tpuembed.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    reason,
)
from tpuembed.files import FilePath, UrlPath, as_path, open_stream
from tpuembed.formats.protobuf import MalformedError, UnsupportedError, shown
from tpuembed.formats.sstable import read_table, write_table
from tpuembed.formats.tensor_bundle.entries import (
    Entry,
    Region,
    Slice,
    decode_entry,
    decode_header,
    encode_entries,
    encode_header,
)

__all__ = ["BundleIndex", "check_tiling", "index_path", "merge_entries", "read_index", "shard_path", "write_index"]

_MAX_CUT_DIMS: Final = 8


def check_tiling(shape: tuple[int, ...], slices: Sequence[Slice]) -> str:
    """Raise MalformedError unless the boxes `slices`, each inside `shape`, cover every element exactly once.

    Returns "", or what is wrong if they have too few elements.

    Remove corners that coincide in pairs. A set of boxes covers exactly the elements of one box an odd number of times
    if and only if the corners of that box are left. If the volumes also add up, "odd" is "once". This takes time linear
    in the number of slices, in any arrangement.
    """
    held, volume = sum(math.prod(piece.shape) for piece in slices), math.prod(shape)
    if held < volume:
        return f"its {len(slices)} slices leave holes: {held} elements of {volume}"
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
    return ""


def _corners(start: Sequence[int], shape: Sequence[int], cut: Sequence[int]) -> set[tuple[int, ...]]:
    """Return the box's corners in the dimensions `cut`, without those that coincide."""
    if any(shape[dim] == 0 for dim in cut):
        return set()
    return set(itertools.product(*((start[dim], start[dim] + shape[dim]) for dim in cut)))


@dataclasses.dataclass(frozen=True)
class BundleIndex:
    """The content of an index file: an entry per tensor, and the number of data files."""

    entries: Mapping[str, Entry]
    num_shards: int


@overload
def index_path(prefix: str | Path) -> Path: ...
@overload
def index_path(prefix: UrlPath) -> UrlPath: ...
def index_path(prefix: str | FilePath) -> FilePath:
    """Return the index file of the bundle `prefix`. A string is a path on a disk."""
    return _with_ending(prefix, ".index")


@overload
def shard_path(prefix: str | Path, shard: int, num_shards: int) -> Path: ...
@overload
def shard_path(prefix: UrlPath, shard: int, num_shards: int) -> UrlPath: ...
def shard_path(prefix: str | FilePath, shard: int, num_shards: int) -> FilePath:
    """Return data file number `shard` of `num_shards` of the bundle `prefix`. A string is a path on a disk."""
    return _with_ending(prefix, f".data-{shard:05d}-of-{num_shards:05d}")


def _with_ending(prefix: str | FilePath, ending: str) -> FilePath:
    if isinstance(prefix, UrlPath):
        return dataclasses.replace(prefix, key=prefix.key + ending)
    return Path(f"{prefix}{ending}")


def read_index(path: str | FilePath) -> BundleIndex:
    """Read and check an index file. Data files are not read.

    Raises:
        CheckpointNotFoundError: the file does not exist.
        CheckpointCorruptError: it contradicts itself: a CRC, a size, slices that overlap. (See Entry for slices with
            holes.)
        CheckpointFormatError: it is compressed, big-endian or of a newer version.
    """
    try:
        with open_stream(as_path(path)) as file:
            return _parse(file)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"index {path}: no such file. Check the checkpoint's path.") from None
    except OSError as error:
        raise CheckpointError(f"index {path}: cannot be read: {reason(error)}.") from None
    except UnsupportedError as error:
        raise CheckpointFormatError(
            f"index {path}: {error}, which is not supported. Restore it in TensorFlow and save it again."
        ) from None
    except MalformedError as error:
        raise CheckpointCorruptError.of(f"index {path}: {error}") from None


def _parse(file: BinaryIO) -> BundleIndex:
    header: int | None = None
    tensors: dict[bytes, tuple[Entry, tuple[Region, ...]]] = {}
    for key, value in read_table(file):
        if not key:
            header = decode_header(value)
            continue
        try:
            tensors[key] = decode_entry(key, value)
        except MalformedError as error:
            raise type(error)(f"tensor {shown(key)}: {error}") from None
    if header is None:
        raise MalformedError("it has no header")
    pieces = {key: tensors.pop(key)[0] for key in list(tensors) if key.startswith(b"\0")}  # entries of slices
    entries: dict[str, Entry] = {}
    for key, (entry, regions) in tensors.items():
        try:
            if regions:
                slices = tuple(_take_slice(entry, region, pieces) for region in regions)
                entry = dataclasses.replace(entry, slices=slices, holes=check_tiling(entry.shape, slices))
            for part in entry.parts():
                if part.shard >= header:
                    raise MalformedError(f"it is in data file {part.shard}, but the header has {header} data files")
            entries[key.decode()] = entry
        except UnicodeDecodeError:
            raise MalformedError(f"tensor {shown(key)}: its name is not UTF-8") from None
        except MalformedError as error:
            raise type(error)(f"tensor {shown(key)}: {error}") from None
    if pieces:
        raise MalformedError(f"{len(pieces)} slices belong to no tensor; the first is {shown(min(pieces))}")
    return BundleIndex(entries, header)


def _take_slice(whole: Entry, region: Region, pieces: dict[bytes, Entry]) -> Slice:
    """Remove the slice of `whole` at `region` from `pieces` and return it."""
    piece, (_, start, shape) = pieces.pop(region.key, None), region
    if piece is None:
        raise MalformedError(f"its slice at {list(start)} of shape {list(shape)} is missing")
    if (piece.dtype, piece.shape) != (whole.dtype, shape):
        raise MalformedError(
            f"its slice at {list(start)} should be {whole.dtype} {list(shape)}, but the index has {piece.dtype} "
            f"{list(piece.shape)}"
        )
    return dataclasses.replace(piece.parts()[0], start=start)


def write_index(path: str | Path, entries: Mapping[str, Entry], num_shards: int) -> None:
    """Write an index file over `num_shards` data files, including slices. The file is not flushed to the disk."""
    items = {b"": encode_header(num_shards)}
    for name, entry in entries.items():
        items.update(encode_entries(name, entry))
    with open(path, "wb") as file:
        write_table(file, sorted(items.items()))


def merge_entries(parts: Sequence[BundleIndex]) -> BundleIndex:
    """Return one index over the data files of all `parts`. The first part keeps its numbers, the next ones follow.

    The data files have to be renamed to match: file `s` of a part becomes number `s` plus the data files before it.

    Raises:
        CheckpointCorruptError: two parts have a tensor of the same name.
    """
    merged: dict[str, Entry] = {}
    num_shards = 0
    for part in parts:
        for name, entry in part.entries.items():
            if name in merged:
                raise CheckpointCorruptError(f"tensor {name!r} is in two of the bundles to merge. Rename one.")
            slices = tuple(dataclasses.replace(piece, shard=piece.shard + num_shards) for piece in entry.slices)
            shard = 0 if slices else entry.shard + num_shards
            merged[name] = dataclasses.replace(entry, shard=shard, slices=slices)
        num_shards += part.num_shards
    return BundleIndex(merged, num_shards)
