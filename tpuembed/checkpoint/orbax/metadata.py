"""From a user's path to the items of one Orbax checkpoint, and to the trees of arrays in them.

Orbax's CheckpointManager writes DIR/<step>/<item>/, and its Checkpointer one item at the given path. An item with
arrays has a file `_METADATA`, one with a protocol buffer `proto.pbtxt`.

Source: orbax/checkpoint/_src/path/step.py, orbax/checkpoint/_src/handlers; InternalTreeMetadata and ParamInfo names in
orbax/checkpoint/_src/metadata/tree.py (orbax-checkpoint 0.12).
"""

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointNotFoundError, first_few
from tpuembed.files import FilePath

__all__ = ["Item", "Leaf", "OrbaxStep", "find_step", "is_orbax", "metadata_files", "read_item"]

_METADATA: Final = "_METADATA"
_MANIFEST: Final = "manifest.ocdbt"
_STEP_METADATA: Final = "_CHECKPOINT_METADATA"
_PROTO: Final = "proto.pbtxt"
_UNFINISHED: Final = ".orbax-checkpoint-tmp"
_OLD_AGGREGATE: Final = "checkpoint"
_NUMBERED: Final = re.compile(r"(?P<prefix>|[^.]*_)(?P<number>\d{1,18})")
"""A step such as 1200, or with a prefix checkpoint_1200."""


@dataclasses.dataclass(frozen=True)
class OrbaxStep:
    """One checkpoint.

    Attributes:
        path: of its folder, or of the only item that the user named.
        items: the folders with arrays, sorted.
        protos: the files that may describe how tables are stacked, sorted.
    """

    path: FilePath
    items: tuple[FilePath, ...]
    protos: tuple[FilePath, ...]


def is_orbax(path: FilePath) -> bool:
    """Returns True if `path` is an item, a step, a folder of steps, or one of Orbax's own files."""
    if path.name in {_METADATA, _MANIFEST, _STEP_METADATA}:
        return path.is_file()
    return _is_item(path) or _is_step(path) or _is_old(path) or bool(_steps(path))


def find_step(path: FilePath) -> OrbaxStep:
    """Return the checkpoint that `path`, which `is_orbax` accepts, names: the latest in a folder of steps."""
    folder = path.parent if path.is_file() else path
    if _UNFINISHED in folder.name:
        raise CheckpointFormatError(
            f"checkpoint {folder}: was never finished (Orbax renames a finished one). Give the path of a finished one."
        )
    if _is_old(folder):
        raise CheckpointFormatError(
            f"checkpoint {folder}: was written by a version of Orbax that saved no {_METADATA}, which is not "
            "supported. Restore it with Orbax and save it again."
        )
    if _is_item(folder):
        return OrbaxStep(folder, (folder,), _protos(folder.parent) if _is_step(folder.parent) else ())
    step = folder
    if not _is_step(folder):  # the step of the highest number
        names = [child.name for child in _steps(folder) if _UNFINISHED not in child.name]
        if not names:
            raise CheckpointNotFoundError(
                f"directory {folder}: contains only Orbax checkpoints that were never finished. Wait for one, or give "
                "the path of another."
            )
        numbered = [match for match in map(_NUMBERED.fullmatch, names) if match]
        if len({match["prefix"] for match in numbered}) > 1:
            raise CheckpointFormatError(
                f"directory {folder}: contains several checkpoints ({first_few(names)}). Give the path of one."
            )
        step = folder / max(numbered, key=lambda match: int(match["number"]))[0]
    items = tuple(child for child in _folders(step) if _is_item(child))
    if not items:
        raise CheckpointCorruptError.of(f"checkpoint {step}: has {_STEP_METADATA} but no item with {_METADATA}")
    return OrbaxStep(step, items, _protos(step))


def _is_item(folder: FilePath) -> bool:
    return (folder / _METADATA).is_file() or (folder / _MANIFEST).is_file()


def _is_step(folder: FilePath) -> bool:
    """Returns True for a step. Orbax of 2024 or before wrote no file into it: on a disk it is recognised by its items."""
    if (folder / _STEP_METADATA).is_file():
        return True
    return isinstance(folder, Path) and any(_is_item(child) for child in _folders(folder))


def _is_old(folder: FilePath) -> bool:
    """Returns True for one aggregate file in msgpack beside one folder per array."""
    if not isinstance(folder, Path) or not (folder / _OLD_AGGREGATE).is_file() or (folder / _METADATA).is_file():
        return False
    return any((child / ".zarray").is_file() for child in _folders(folder))


def _folders(path: FilePath) -> list[FilePath]:
    """Return the folders directly below `path`. In a store, files are included, to save requests."""
    if isinstance(path, Path):
        return sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
    return sorted(path.iterdir())


def _steps(path: FilePath) -> list[FilePath]:
    """Return the steps directly below `path`, finished or not."""
    children = [child for child in _folders(path) if _UNFINISHED in child.name or _NUMBERED.fullmatch(child.name)]
    return [child for child in children if _UNFINISHED in child.name or _is_step(child)]


def _protos(step: FilePath) -> tuple[FilePath, ...]:
    return tuple(child / _PROTO for child in _folders(step) if (child / _PROTO).is_file())


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
    """Return the tree of `folder`."""
    where = f"file {folder / _METADATA}"
    try:
        data = json.loads((folder / _METADATA).read_bytes(), object_pairs_hook=_unique)
    except FileNotFoundError:
        raise CheckpointCorruptError.of(f"checkpoint {folder}: has {_MANIFEST} but no {_METADATA}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError.of(f"{where}: is not JSON: {error}") from None
    item = Item(
        folder,
        ocdbt=_get(where, data, "use_ocdbt", bool, (folder / _MANIFEST).is_file()),
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
    where = f"file {item.folder / _METADATA}: {_short(name)!r}"
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
            f"file {item.folder / _METADATA}: array {leaf.shown} would be in {leaf.key!r}, outside the checkpoint"
        )
    return leaf


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def metadata_files(step: OrbaxStep, items: Iterable[Item]) -> list[FilePath]:
    """Return the files that change when any array does."""
    files = list(step.protos)
    if (step.path / _STEP_METADATA).is_file():
        files.append(step.path / _STEP_METADATA)
    for item in items:
        files.append(item.folder / _METADATA)
        if item.ocdbt and (item.folder / _MANIFEST).is_file():  # an item without arrays has none
            files.append(item.folder / _MANIFEST)
    return files
