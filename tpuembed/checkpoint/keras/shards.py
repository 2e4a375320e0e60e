"""Reads `.weights.json` files, which map groups of a model's weights to HDF5 files beside them."""

import json
from pathlib import Path
from typing import Any, Final

from tpuembed.errors import CheckpointCorruptError, CheckpointError, reason
from tpuembed.files import FilePath, versions

__all__ = ["INDEX_ENDING", "read_index", "shard_path"]

INDEX_ENDING: Final = ".weights.json"
_MAX_INDEX_BYTES: Final = 64 << 20
_MAX_FILES: Final = 10_000


def read_index(path: FilePath) -> dict[str, tuple[str, ...]]:
    """Return group of variables -> names of the files in the folder of `path` that have its arrays.

    Raises:
        CheckpointCorruptError: it does not parse, or names a file in another folder.
    """
    try:
        if versions([path])[0].size > _MAX_INDEX_BYTES:
            raise _corrupt(path, f"has over {_MAX_INDEX_BYTES} bytes")
        index = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"weights index {path}: cannot be read: {reason(error)}.") from None
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"does not parse: {reason(error)}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _corrupt(path, "has no mapping `weight_map` of groups to files")
    found = {group.strip("/"): _names(path, group, value) for group, value in weight_map.items()}
    if len(found) != len(weight_map) or len({name for names in found.values() for name in names}) > _MAX_FILES:
        raise _corrupt(path, f"names a group twice, or over {_MAX_FILES} files")
    return found


def _names(path: FilePath, group: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise _corrupt(path, f"maps group {group!r} to {value!r}, which are not names of files")
    for name in names:
        _check_name(path, name)
    if len(set(names)) != len(names):
        raise _corrupt(path, f"maps group {group!r} to one file twice")
    return tuple(names)


def _check_name(path: FilePath, name: str) -> None:
    """Raise CheckpointCorruptError unless `name` is a file beside the index, as Keras writes it."""
    if not name.isprintable() or name in ("", ".", "..") or "/" in name or "\\" in name:
        raise _corrupt(path, f"names {name!r}, which is not a file beside it")


def shard_path(index: FilePath, name: str) -> FilePath:
    """Return the path of the file `name`, which `index` names.

    Raises:
        CheckpointCorruptError: it is missing, or a link out of the folder.
    """
    path = index.parent / name
    if isinstance(path, Path) and path.resolve().parent != Path(index.parent).resolve():
        raise _corrupt(index, f"names {name!r}, which is a link to another folder. Copy the file here")
    if not path.is_file():
        raise CheckpointCorruptError(f"weights file {path}: is missing, but {index} puts weights in it. Copy it here.")
    return path


def _corrupt(path: FilePath, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError.of(f"weights index {path}: {what}")
