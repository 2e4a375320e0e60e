"""Keras' weight files, one or several, as groups of variables; and the paths that users may give for them.

Source: keras/src/saving/saving_lib.py (H5IOStore, ShardedH5IOStore, `_save_state`).
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final, Self

from tpuembed.checkpoint.keras.archive import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    WEIGHTS_NAME,
    check_crc32,
    open_archive,
    parse_config,
)
from tpuembed.checkpoint.keras.hdf5 import Dataset, Listing, Window, list_file
from tpuembed.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    UnknownObjectError,
    first_few,
    reason,
)
from tpuembed.files import FilePath, open_bytes, versions

__all__ = ["Group", "Weights", "find_weights", "open_window"]

_ARCHIVE_ENDING: Final = ".keras"
_H5_ENDINGS: Final = (".h5", ".hdf5")
_H5_SIGNATURE: Final = b"\x89HDF\r\n\x1a\n"
_SHARD_NAME: Final = re.compile(r"(?P<base>.+)_\d{5}\.weights\.h5")
_INDEX_ENDING: Final = ".weights.json"
"""Of a file that maps groups of variables to HDF5 files beside it."""
_MAX_INDEX_BYTES: Final = 64 << 20
_MAX_FILES: Final = 10_000


@dataclasses.dataclass(frozen=True)
class Group:
    """The variables that one object saved.

    Attributes:
        path: of the object, names joined with "/"; "" for the model.
        name: of the layer, or of the table; None if the file does not have it.
        datasets: its variables.
    """

    path: str
    name: str | None
    datasets: Mapping[str, Dataset]


@dataclasses.dataclass(frozen=True)
class Weights:
    """The files of one save.

    Attributes:
        path: of the file that a user would give.
        files: all files that were read.
        windows: those of them that are HDF5, opened.
        opened: closes them.
        groups: by path; none in a file that Keras 3 did not write.
        config: the model's, of a `.keras` file; None elsewhere.
        crc32: of the one window, as the `.keras` file that it lies in states it; None elsewhere.
    """

    path: FilePath
    files: tuple[FilePath, ...]
    windows: tuple[Window, ...]
    opened: contextlib.ExitStack
    groups: Mapping[str, Group]
    config: dict[str, Any] | None
    crc32: int | None = None

    @classmethod
    def open(cls, path: FilePath) -> Self:
        """Open the file that `find_weights` found.

        Raises:
            CheckpointCorruptError: a file is damaged or missing, or the files contradict each other.
            CheckpointFormatError: they are of a kind that is not supported.
            MissingExtraError: h5py is not installed.
        """
        index = _read_index(path) if path.name.endswith(_INDEX_ENDING) else None
        names = sorted({name for names in (index or {}).values() for name in names})
        parts = [path] if index is None else [path.parent / name for name in names]
        for part in () if index is None else parts:
            if isinstance(part, Path) and part.resolve().parent != Path(path.parent).resolve():
                raise _corrupt_index(
                    path, f"names {part.name!r}, which is a link to another folder. Copy the file here"
                )
            if not part.is_file():
                raise CheckpointCorruptError(
                    f"weights file {part}: is missing, but {path} puts weights in it. Copy it here."
                )
        with contextlib.ExitStack() as opened:
            windows: list[Window] = []
            for part in parts:
                windows.append(open_window(part))
                opened.callback(windows[-1].file.close)
            files: tuple[FilePath, ...] = (path,) if index is None else (path, *parts)
            config: dict[str, Any] | None = None
            crc32: int | None = None
            if path.suffix == _ARCHIVE_ENDING:
                archive = open_archive(windows[0])
                windows, config, crc32 = [archive.weights], archive.config, archive.weights_crc32
            elif path.name == WEIGHTS_NAME and (beside := path.parent / CONFIG_NAME).is_file():  # saved unzipped
                if versions([beside])[0].size > MAX_CONFIG_BYTES:
                    raise CheckpointCorruptError(
                        f"model file {beside}: has over {MAX_CONFIG_BYTES} bytes. Give another copy."
                    )
                files, config = (path, beside), parse_config(str(path.parent), beside.read_bytes())
            listings: list[Listing] = []
            for window in windows:
                listings.append(list_file(window))
                opened.callback(listings[-1].file.close)
            groups = _merge_groups(path, listings)
            if index is not None:
                _check_index(path, index, groups)
            inside = {dataset.path for group in groups.values() for dataset in group.datasets.values()}
            loose = [name for listing in listings for name in listing.datasets if name not in inside]
            if groups and loose:
                raise _corrupt(path, f"has {loose[0]!r} outside of the groups that Keras writes")
            return cls(path, files, tuple(windows), opened.pop_all(), groups, config, crc32)

    def below(self, root: Any) -> Self:
        """Return the groups of the object at `root`, such as layers/functional_1, and of everything below it.

        Raises:
            UnknownObjectError: there is no such object.
        """
        path = root.strip("/") if isinstance(root, str) else ""
        kept = {
            name[len(path) :].strip("/"): group
            for name, group in self.groups.items()
            if path and f"{name}/".startswith(f"{path}/")
        }
        if not kept:
            raise UnknownObjectError.of(
                f"weights {self.path}: has no object {root!r} (option root)", self._holders_of_layers()
            )
        groups = {name: dataclasses.replace(group, path=name) for name, group in kept.items()}
        return dataclasses.replace(self, groups=groups, config=None)

    def verify(self) -> None:
        """Read the weights of a `.keras` file through, and compare them with the CRC32 of the archive; see `check_crc32`.

        Other files keep no checksums, and are not read.
        """
        if self.crc32 is not None:
            check_crc32(self.windows[0], self.crc32)

    def _holders_of_layers(self) -> list[str]:
        """The paths of the objects that hold objects with values, nearest first: models, and layers of layers; no lists."""
        held = {path for path, group in self.groups.items() if group.datasets and path.partition("/")[0] != "optimizer"}
        around = {str(parent) for path in held for parent in PurePosixPath(path).parents} & set(self.groups)
        return sorted(around, key=lambda path: (path.count("/"), path))

    def close(self) -> None:
        """Close the files."""
        self.opened.close()


def find_weights(path: FilePath) -> FilePath | None:
    """Return the weight file, index of weight files or `.keras` file that `path` names, or None if there is none.

    `path` is that file; or a directory with exactly one, or with one per epoch, of which the last is returned; or a
    directory that `model.save(..., zipped=False)` wrote.

    Raises:
        CheckpointFormatError: a directory has several, or `path` is one of several files that belong together.
    """
    if path.is_file():
        shard = _SHARD_NAME.fullmatch(path.name)
        if shard and (path.parent / f"{shard['base']}{_INDEX_ENDING}").is_file():
            raise CheckpointFormatError(
                f"weights file {path}: is one of several that belong together. Give {shard['base']}{_INDEX_ENDING}."
            )
        if path.name.endswith((_INDEX_ENDING, _ARCHIVE_ENDING, *_H5_ENDINGS)):
            return path
        if not isinstance(path, Path):
            return None
        with open(path, "rb") as file:
            return path if file.read(len(_H5_SIGNATURE)) == _H5_SIGNATURE else None
    if not path.is_dir():
        return None
    if (path / WEIGHTS_NAME).is_file() and (path / CONFIG_NAME).is_file():
        return path / WEIGHTS_NAME
    endings = (_ARCHIVE_ENDING, ".weights.h5", _INDEX_ENDING)
    names = sorted(child.name for child in path.iterdir() if child.name.endswith(endings))
    bases = {name.removesuffix(_INDEX_ENDING) for name in names if name.endswith(_INDEX_ENDING)}
    names = [name for name in names if not ((shard := _SHARD_NAME.fullmatch(name)) and shard["base"] in bases)]
    names = [name for name in names if (path / name).is_file()]
    if len(names) < 2:
        return path / names[0] if names else None
    latest = _latest(names)
    if latest is None:
        raise CheckpointFormatError(
            f"directory {path}: contains several weight files ({first_few(names)}). Give the path of one."
        )
    return path / latest


def _latest(names: list[str]) -> str | None:
    """Return the name with the highest number if the names differ in one number, as ModelCheckpoint's per epoch; else
    None.
    """
    parts = [re.split(r"(\d+)", name) for name in names]
    if len({len(part) for part in parts}) > 1:
        return None
    differ = [index for index, values in enumerate(zip(*parts, strict=True)) if len(set(values)) > 1]
    if len(differ) != 1 or differ[0] % 2 == 0:
        return None
    numbers = [int(part[differ[0]]) for part in parts]
    return names[numbers.index(max(numbers))] if len(set(numbers)) == len(numbers) else None


def open_window(path: FilePath) -> Window:
    """Return the whole file at `path`. Raises CheckpointError if it cannot be read."""
    try:
        file = open_bytes(path)
    except OSError as error:
        raise CheckpointError(f"weights file {path}: cannot be read: {reason(error)}.") from None
    return Window(str(path), file, 0, file.version.size)


def _merge_groups(path: FilePath, listings: list[Listing]) -> dict[str, Group]:
    """Return the groups of all files. A group may continue in a second file, where Keras does not repeat its name."""
    names: dict[str, str | None] = {}
    datasets: dict[str, dict[str, Dataset]] = {}
    for listing in listings:
        for group, name in listing.groups.items():
            known = names.get(group)
            if name is not None and known not in (None, name):
                raise _corrupt(path, f"calls {group!r} both {known!r} and {name!r}")
            names[group] = name if known is None else known
        for dataset in listing.datasets.values():
            group, _, variable = dataset.path.rpartition("/")
            if variable in datasets.setdefault(group, {}):
                raise _corrupt(path, f"has {dataset.path!r} in two files")
            datasets[group][variable] = dataset
    return {
        _object_path(group): Group(_object_path(group), name, datasets.get(group, {})) for group, name in names.items()
    }


def _object_path(group: str) -> str:
    return group.removesuffix("vars").rstrip("/")


def _check_index(path: FilePath, index: Mapping[str, tuple[str, ...]], groups: Mapping[str, Group]) -> None:
    """Raise CheckpointCorruptError unless the files have exactly the groups in the index."""
    for name in index:
        if name.rpartition("/")[2] != "vars" or _object_path(name) not in groups:
            raise _corrupt(path, f"its index names a group {name!r}, which is in no file")
    for group in groups.values():
        held = {dataset.file.name.rpartition("/")[2] for dataset in group.datasets.values()}
        listed = set(index.get(f"{group.path}/vars".lstrip("/"), ()))
        if held != listed:
            raise _corrupt(
                path, f"its index puts {group.path!r} in {sorted(listed)}, but its arrays are in {sorted(held)}"
            )


def _corrupt(path: FilePath, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError.of(f"weights {path}: {what}")


def _read_index(path: FilePath) -> dict[str, tuple[str, ...]]:
    """Return group of variables -> names of the files in the folder of `path` that have its arrays."""
    try:
        if versions([path])[0].size > _MAX_INDEX_BYTES:
            raise _corrupt_index(path, f"has over {_MAX_INDEX_BYTES} bytes")
        index = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"weights index {path}: cannot be read: {reason(error)}.") from None
    except (ValueError, RecursionError) as error:
        raise _corrupt_index(path, f"does not parse: {reason(error)}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _corrupt_index(path, "has no mapping `weight_map` of groups to files")
    found: dict[str, tuple[str, ...]] = {}
    for group, value in weight_map.items():
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise _corrupt_index(path, f"maps group {group!r} to {value!r}, which are not names of files")
        for name in names:
            if not name.isprintable() or name in ("", ".", "..") or "/" in name or "\\" in name:
                raise _corrupt_index(path, f"names {name!r}, which is not a file beside it")
        if len(set(names)) != len(names):
            raise _corrupt_index(path, f"maps group {group!r} to one file twice")
        found[group.strip("/")] = tuple(names)
    if len(found) != len(weight_map) or len({name for names in found.values() for name in names}) > _MAX_FILES:
        raise _corrupt_index(path, f"names a group twice, or over {_MAX_FILES} files")
    return found


def _corrupt_index(path: FilePath, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError.of(f"weights index {path}: {what}")
