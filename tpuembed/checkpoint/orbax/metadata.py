"""Reads the tree of one item from its `_METADATA` file: its arrays and where they are stored.

Source: orbax/checkpoint/_src/metadata/tree.py (InternalTreeMetadata) and its ParamInfo names (orbax-checkpoint 0.12).
"""

import dataclasses
import json
from typing import Any, Final

from tpuembed.checkpoint.orbax.location import MANIFEST, METADATA
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError
from tpuembed.files import FilePath

__all__ = ["Item", "Leaf", "read_item"]

_NO_ARRAYS: Final = frozenset({"scalar", "string", "placeholder", "None", "Dict", "List", "Tuple", "NamedTuple"})
_SEQUENCE: Final = 1
"""The type of a key that is a position in a list; other keys are of mappings."""
_KINDS: Final = {bool: "true or false as", dict: "an object", list: "a list", str: "a string", int: "an integer"}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A node of a tree that has no children.

    Attributes:
        item: the folder of its tree.
        path: the keys that lead to it.
        write_shape: of the equal parts that it was written in, one per shard, if the metadata has it.
        is_array: False for strings, numbers and empty containers.
    """

    item: "Item"
    path: tuple[str, ...]
    write_shape: tuple[int, ...] | None
    is_array: bool

    @property
    def rank(self) -> int | None:
        """Return the number of dimensions, if the metadata has it."""
        return None if self.write_shape is None else len(self.write_shape)

    @property
    def key(self) -> str:
        """Return the name of its files in the item's store."""
        return ".".join(self.path)

    @property
    def shown(self) -> str:
        """Return the name for messages."""
        return repr(_short("/".join(self.path)))


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    """A folder of arrays.

    Attributes:
        folder: the folder.
        ocdbt: whether all arrays are in one OCDBT database, not each in a folder.
        zarr3: whether they are zarr version 3, not 2.
        complete: whether the metadata records that every chunk was written.
        leaves: of its tree.
    """

    folder: FilePath
    ocdbt: bool
    zarr3: bool
    complete: bool
    leaves: tuple[Leaf, ...] = ()


def read_item(folder: FilePath) -> Item:
    """Return the tree of `folder`.

    Raises:
        CheckpointCorruptError: its metadata is missing, or not what Orbax writes.
        CheckpointFormatError: Orbax wrote one array over another.
    """
    data, where = _load(folder), f"file {folder / METADATA}"
    item = Item(
        folder,
        ocdbt=_get(where, data, "use_ocdbt", bool, (folder / MANIFEST).is_file()),
        zarr3=_get(where, data, "use_zarr3", bool, False),
        complete=_get(where, data, "store_array_data_equal_to_fill_value", bool, False),
    )
    leaves = tuple(_leaf(item, name, node) for name, node in _get(where, data, "tree_metadata", dict).items())
    # Keys are joined by ".", which they may contain.
    seen: dict[str, Leaf] = {}
    for leaf in leaves:
        other = seen.setdefault(leaf.key, leaf)
        if leaf.is_array and other is not leaf:
            raise CheckpointFormatError(
                f"checkpoint {folder}: arrays {other.shown} and {leaf.shown} are both stored as {leaf.key!r}, one "
                "over the other. Rename one and save again."
            )
    return dataclasses.replace(item, leaves=leaves)


def _load(folder: FilePath) -> Any:
    path = folder / METADATA
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=_unique)
    except FileNotFoundError:
        raise CheckpointCorruptError.of(f"checkpoint {folder}: has {MANIFEST} but no {METADATA}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError.of(f"file {path}: is not JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key appears twice in one object")
    return found


def _get(where: str, value: Any, key: str, kind: type, default: Any = None) -> Any:
    """Return the value of `key`. Raises CheckpointCorruptError if it is not of the type `kind`."""
    found = value.get(key, default) if isinstance(value, dict) else None
    if not isinstance(found, kind):
        raise CheckpointCorruptError.of(f"{where} should have {_KINDS[kind]} {key!r}")
    return found


def _leaf(item: Item, name: str, node: Any) -> Leaf:
    where = f"file {item.folder / METADATA}: {_short(name)!r}"
    parts = _get(where, node, "key_metadata", list)
    keys = tuple(_get(where, part, "key", str) for part in parts)
    kinds = [_get(where, part, "key_type", int) for part in parts]
    places = tuple(
        int(key) if kind == _SEQUENCE and key.isdecimal() and len(key) < 20 else key
        for key, kind in zip(keys, kinds, strict=True)
    )
    if not keys or any("\0" in key for key in keys) or name not in {str(keys), str(places)}:
        raise CheckpointCorruptError.of(f"{where} should be the path {_short(str(keys))}")
    value = _get(where, node, "value_metadata", dict)
    shape = value.get("write_shape")
    if shape is not None and not (isinstance(shape, list) and all(type(size) is int for size in shape)):
        raise CheckpointCorruptError.of(f"{where} should have a list of integers 'write_shape'")
    is_array = _get(where, value, "value_type", str) not in _NO_ARRAYS
    leaf = Leaf(item, keys, None if shape is None else tuple(shape), is_array)
    if not item.ocdbt and any(part in {"", ".", ".."} for part in leaf.key.split("/")):
        raise CheckpointCorruptError.of(
            f"file {item.folder / METADATA}: array {leaf.shown} would be in {leaf.key!r}, outside the checkpoint"
        )
    return leaf


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
