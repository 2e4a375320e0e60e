"""From a user's path to the items of one Orbax checkpoint.

Orbax's CheckpointManager writes DIR/<step>/<item>/, and its Checkpointer one item at the given path. An item with
arrays has a file `_METADATA`, one with a protocol buffer `proto.pbtxt`.

Source: orbax/checkpoint/_src/path/step.py, orbax/checkpoint/_src/handlers (orbax-checkpoint 0.12).
"""

import dataclasses
import re
from pathlib import Path
from typing import Final

from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointNotFoundError, first_few
from tpuembed.files import FilePath

__all__ = ["MANIFEST", "METADATA", "STEP_METADATA", "OrbaxStep", "find_step", "is_orbax"]

METADATA: Final = "_METADATA"
MANIFEST: Final = "manifest.ocdbt"
STEP_METADATA: Final = "_CHECKPOINT_METADATA"
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
    if path.name in {METADATA, MANIFEST, STEP_METADATA}:
        return path.is_file()
    return _is_item(path) or _is_step(path) or _is_old(path) or bool(_steps(path))


def find_step(path: FilePath) -> OrbaxStep:
    """Return the checkpoint that `path`, which `is_orbax` accepts, names: the latest in a folder of steps.

    Raises:
        CheckpointFormatError: its layout is not supported, or it is ambiguous.
        CheckpointNotFoundError: a folder has only steps that were never finished.
        CheckpointCorruptError: a step has no item.
    """
    folder = path.parent if path.is_file() else path
    if _UNFINISHED in folder.name:
        raise CheckpointFormatError(
            f"checkpoint {folder}: was never finished (Orbax renames a finished one). Give the path of a finished one."
        )
    if _is_old(folder):
        raise CheckpointFormatError(
            f"checkpoint {folder}: was written by a version of Orbax that saved no {METADATA}, which is not "
            "supported. Restore it with Orbax and save it again."
        )
    if _is_item(folder):
        return OrbaxStep(folder, (folder,), _protos(folder.parent) if _is_step(folder.parent) else ())
    step = folder if _is_step(folder) else _latest(folder)
    items = tuple(child for child in _folders(step) if _is_item(child))
    if not items:
        raise CheckpointCorruptError.of(f"checkpoint {step}: has {STEP_METADATA} but no item with {METADATA}")
    return OrbaxStep(step, items, _protos(step))


def _is_item(folder: FilePath) -> bool:
    return (folder / METADATA).is_file() or (folder / MANIFEST).is_file()


def _is_step(folder: FilePath) -> bool:
    """Returns True for a step. Orbax of 2024 or before wrote no file into it: on a disk it is recognised by its items."""
    if (folder / STEP_METADATA).is_file():
        return True
    return isinstance(folder, Path) and any(_is_item(child) for child in _folders(folder))


def _is_old(folder: FilePath) -> bool:
    """Returns True for one aggregate file in msgpack beside one folder per array."""
    if not isinstance(folder, Path) or not (folder / _OLD_AGGREGATE).is_file() or (folder / METADATA).is_file():
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


def _latest(folder: FilePath) -> FilePath:
    """Return the step of the highest number."""
    names = [step.name for step in _steps(folder) if _UNFINISHED not in step.name]
    if not names:
        raise CheckpointNotFoundError(
            f"directory {folder}: contains only Orbax checkpoints that were never finished. Wait for one, or give "
            "the path of another."
        )
    numbers = {name: _NUMBERED.fullmatch(name) for name in names}
    if len({match["prefix"] for match in numbers.values() if match}) > 1:
        raise CheckpointFormatError(
            f"directory {folder}: contains several checkpoints ({first_few(names)}). Give the path of one."
        )
    return folder / max(names, key=lambda name: int((numbers[name] or {"number": 0})["number"]))
