"""Which versions a MODEL_DIR has, what each takes on the disk, and what it needs of others."""

import contextlib
import dataclasses
import os
import stat
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tpuembed.errors import ConfigError, reason
from tpuembed.export.publish.version_writer import versions_among
from tpuembed.export.report import VersionReport
from tpuembed.files import FilePath, as_path
from tpuembed.formats.saved_model import GRAPH_FILE, mapped_folders, size_faults
from tpuembed.manifest import Manifest

__all__ = [
    "VersionInfo",
    "bases_of",
    "file_bytes",
    "find_version",
    "is_loadable",
    "is_whole",
    "list_versions",
    "local_model_dir",
    "version_folders",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class VersionInfo(VersionReport):
    """One version of a MODEL_DIR.

    Attributes:
        age_seconds: time since its folder was written, or last changed.
        bytes_own: bytes that only this version has.
        bytes_shared: bytes of its files that are hard links of other folders too, such as tables of another version.
        layout: "variables" or "mmap"; empty if tpuembed did not write it.
        bases: the versions beside it that it cannot be served without, and the base of an overlay.
        fault: why it is incomplete, so that no server loads it; empty if nothing is missing.
    """

    age_seconds: float
    bytes_own: int
    bytes_shared: int
    layout: str
    bases: tuple[int, ...]
    fault: str


def list_versions(model_dir: str | FilePath) -> tuple[VersionInfo, ...]:
    """Return the versions in `model_dir`, a folder of a disk, the oldest number first.

    Raises:
        ConfigError: `model_dir` is not a folder of this machine, or has no version.
    """
    found = []
    for number, path in version_folders(local_model_dir(model_dir, "list")):
        try:
            written = path.stat().st_mtime
        except FileNotFoundError:  # it is being removed
            continue
        layout, bases, fault = "", tuple[int, ...](), ""
        try:
            manifest = Manifest.read(path)
            layout = manifest.layout if manifest else ""
            fault, bases = _fault_of(path, manifest), tuple(sorted(bases_of(path)))
        except ConfigError as error:
            fault = str(error)
        own, shared = file_bytes([path])
        info = VersionInfo(
            version=number,
            path=path,
            age_seconds=max(0.0, time.time() - written),
            bytes_own=own,
            bytes_shared=shared,
            layout=layout,
            bases=bases,
            fault=fault,
        )
        found.append(info)
    return tuple(found)


def local_model_dir(model_dir: str | FilePath, doing: str) -> Path:
    """Return the folder of `model_dir`.

    Raises:
        ConfigError: it is in a store, it is missing, or it has no version. The message says that one cannot `doing` there.
    """
    path = as_path(model_dir)
    if not isinstance(path, Path):
        remedy = "Copy it to a disk first"
        if doing == "prune":
            remedy = "In a store, use its own tools, and remove saved_model.pb of a version first"
        raise ConfigError(f"MODEL_DIR {path}: a command can {doing} the versions of a disk alone. {remedy}.")
    try:
        folders = version_folders(path)
    except OSError as error:
        raise ConfigError(f"MODEL_DIR {path}: cannot be listed: {reason(error)}.") from None
    if not folders:
        raise ConfigError(
            f"MODEL_DIR {path}: has no version, which is a folder whose name is a number. Name the folder above them."
        )
    return path


def check_has_rows(model_dir: Path, doing: str) -> None:
    """Raise ConfigError if one cannot `doing` here, because a version is a front, whose rows are in Redis."""
    for number, path in version_folders(model_dir):
        manifest = None
        with contextlib.suppress(ConfigError):
            manifest = Manifest.read(path)
        if manifest is not None and manifest.row_store is not None:
            raise ConfigError(
                f"MODEL_DIR {model_dir}: the rows of version {number} are in Redis, so you cannot {doing} here. Do that in the "
                "MODEL_DIR that it was published from, and publish again. tpuembed publish --keep removes old versions with their "
                "rows."
            )


def version_folders(model_dir: Path) -> list[tuple[int, Path]]:
    """Return the versions with their folders, in order. Of two names of one number, servers load the last."""
    folders = [path for path in model_dir.iterdir() if versions_among([path.name]) and path.is_dir()]
    return sorted((int(path.name), path) for path in folders)


def find_version(model_dir: Path, version: int | None) -> Path:
    """Return the folder of `version`; None for the highest. Raises ConfigError if there is none."""
    paths = dict(version_folders(model_dir))
    number = max(paths) if version is None else version
    if number not in paths:
        has = ", ".join(map(str, sorted(paths)))
        raise ConfigError(f"MODEL_DIR {model_dir}: has no version {number}. It has {has}. Choose one of these.")
    return paths[number]


def is_whole(version_dir: Path) -> bool:
    """Returns True if a server would load the version, as far as the sizes of its files tell.

    Raises:
        ConfigError: its manifest cannot be read.
    """
    return not _fault_of(version_dir, Manifest.read(version_dir))


def is_loadable(version_dir: Path) -> bool:
    """Returns True if a server would load the version, and its manifest can be read."""
    try:
        return is_whole(version_dir)
    except ConfigError:
        return False


def _fault_of(version_dir: Path, manifest: Manifest | None) -> str:
    """Return why no server would load the version, as far as the sizes of its files tell; empty if one would."""
    if not (version_dir / GRAPH_FILE).is_file():
        return f"{GRAPH_FILE} is missing"
    faults = size_faults(version_dir, manifest) if manifest else ()
    return next((f"{file}, {fault}" for file, fault in faults), "")


def bases_of(version_dir: Path) -> set[int]:
    """Return the versions beside `version_dir` that it reads through paths in its graph; and the base of an overlay, because
    the next overlay is compared with it. With symbolic links it may need any of them.

    Raises:
        ConfigError: its manifest or graph cannot be read, so this is not known.
    """
    manifest = Manifest.read(version_dir)
    names = set[str]()
    if any(path.is_symlink() for path in (version_dir, *version_dir.rglob("*"))):
        names |= {path.name for path in version_dir.parent.iterdir()}
    if manifest is not None and manifest.base is not None:
        names.add(str(manifest.base.version))
    if manifest is not None and manifest.layout == "mmap":
        with contextlib.suppress(FileNotFoundError):
            graph = (version_dir / GRAPH_FILE).read_bytes()
            names |= {Path(folder).name for folder in mapped_folders(graph, manifest)}
    return versions_among(names) - {int(version_dir.name)}


def file_bytes(folders: Iterable[Path]) -> tuple[int, int]:
    """Return the bytes of the files that have no link outside of `folders`, and of the others.

    The first is what removing all of the folders gives back. Symbolic links are not followed.
    """
    links, found = dict[tuple[int, int], os.stat_result](), Counter[tuple[int, int]]()
    for folder in folders:
        for place, _, names in os.walk(folder) if not folder.is_symlink() else ():
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                    file = os.lstat(os.path.join(place, name))
                    if stat.S_ISREG(file.st_mode):
                        links[file.st_dev, file.st_ino] = file
                        found[file.st_dev, file.st_ino] += 1
    own = sum(file.st_size for inode, file in links.items() if found[inode] >= file.st_nlink)
    return own, sum(file.st_size for file in links.values()) - own
