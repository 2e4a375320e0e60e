"""Reads the tree of one item from its `_METADATA` file: its arrays and where they are stored.

Source: orbax/checkpoint/_src/metadata/tree.py (InternalTreeMetadata) and its ParamInfo names (orbax-checkpoint 0.12).
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from tpuembed.checkpoint.orbax.location import MANIFEST, METADATA
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError
from tpuembed.files import FilePath

__all__ = ["Item", "Leaf", "read_item"]

_NO_ARRAYS: Final = frozenset({"scalar", "string", "placeholder", "None", "Dict", "List", "Tuple", "NamedTuple"})
_SEQUENCE: Final = 1
"""The type of a key that is a position in a list; other keys are of mappings."""
_ABSENT: Final = object()


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
        text = "/".join(self.path)
        return repr(text if len(text) <= 200 else f"{text[:200]}...")


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
        CheckpointCorruptError: its metadata is missing, or not what Orbax writes, or two arrays share their files.
    """
    data = _Node(folder, "metadata", _load(folder))
    flag = "true or false as"
    item = Item(
        folder,
        ocdbt=data.get("use_ocdbt", bool, flag, (folder / MANIFEST).is_file()),
        zarr3=data.get("use_zarr3", bool, flag, False),
        complete=data.get("store_array_data_equal_to_fill_value", bool, flag, False),
    )
    tree = data.get("tree_metadata", dict, "an object")
    leaves = tuple(_leaf(item, _Node(folder, name, value)) for name, value in tree.items())
    _check_apart(folder, leaves)
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


class _Node:
    """A value of the metadata that should be an object, with its name for messages."""

    def __init__(self, folder: FilePath, name: str, value: Any) -> None:
        self._folder, self._name = folder, name
        self._value: Mapping[str, Any] = value if isinstance(value, dict) else self._fail("is not an object")

    def _fail(self, problem: str) -> NoReturn:
        name, problem = (text if len(text) <= 200 else f"{text[:200]}..." for text in (self._name, problem))
        raise CheckpointCorruptError.of(f"file {self._folder / METADATA}: {name!r} {problem}")

    def get(self, key: str, kind: type, wanted: str, default: Any = _ABSENT) -> Any:
        """Return the value of `key`, of the type `kind`. Raises CheckpointCorruptError if it is another one."""
        value = self._value.get(key, default)
        return value if isinstance(value, kind) else self._fail(f"should have {wanted} {key!r}")

    def keys(self) -> tuple[str, ...]:
        """Return the keys of mappings and sequences from the root. The name of the node must agree with them."""
        parts = [_Node(self._folder, self._name, part) for part in self.get("key_metadata", list, "a list")]
        keys = tuple(part.get("key", str, "a string") for part in parts)
        places = tuple(
            int(key)
            if part.get("key_type", int, "an integer") == _SEQUENCE and key.isdecimal() and len(key) < 20
            else key
            for key, part in zip(keys, parts, strict=True)
        )
        if not keys or any("\0" in key for key in keys) or self._name not in {str(keys), str(places)}:
            self._fail(f"should be the path {keys}")
        return keys

    def write_shape(self) -> tuple[int, ...] | None:
        shape = self._value.get("write_shape")
        if shape is not None and not (isinstance(shape, list) and all(type(size) is int for size in shape)):
            self._fail("should have a list of integers 'write_shape'")
        return None if shape is None else tuple(shape)


def _leaf(item: Item, node: _Node) -> Leaf:
    value = _Node(item.folder, "value_metadata", node.get("value_metadata", dict, "an object"))
    leaf = Leaf(
        item, node.keys(), value.write_shape(), is_array=value.get("value_type", str, "a string") not in _NO_ARRAYS
    )
    if not item.ocdbt and any(part in {"", ".", ".."} for part in leaf.key.split("/")):
        raise CheckpointCorruptError.of(
            f"file {item.folder / METADATA}: array {leaf.shown} would be in {leaf.key!r}, outside the checkpoint"
        )
    return leaf


def _check_apart(folder: FilePath, leaves: tuple[Leaf, ...]) -> None:
    """Raise CheckpointFormatError if Orbax wrote one array over another: keys are joined by ".", which they may
    contain.
    """
    seen: dict[str, Leaf] = {}
    for leaf in leaves:
        other = seen.setdefault(leaf.key, leaf)
        if leaf.is_array and other is not leaf:
            raise CheckpointFormatError(
                f"checkpoint {folder}: arrays {other.shown} and {leaf.shown} are both stored as {leaf.key!r}, one "
                "over the other. Rename one and save again."
            )
