"""Publishes an older version again as the next number, by hard links. Servers of the newest version then load it."""

import dataclasses
import fcntl
import os
import secrets
import shutil
from pathlib import Path, PurePosixPath

from tpuembed.errors import ConfigError
from tpuembed.export.publish.folder import link_or_copy, lock_folder, locked, next_version, publish_folder
from tpuembed.export.publish.version_writer import PREFIX, naming_model_dir
from tpuembed.export.report import VersionReport
from tpuembed.export.retention.listing import check_has_rows, is_loadable, is_whole, local_model_dir, version_folders
from tpuembed.files import FilePath
from tpuembed.formats.saved_model import GRAPH_FILE, check_sizes, mapped_folders, mapped_from, replace_file
from tpuembed.manifest import MANIFEST_PATH, Manifest

__all__ = ["RollbackReport", "rollback_version"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RollbackReport(VersionReport):
    """The result of `rollback_version`.

    Attributes:
        source: the version that it equals.
        newest: the version that was the newest before.
    """

    source: int
    newest: int


def rollback_version(model_dir: str | FilePath, version: int | None = None) -> RollbackReport:
    """Publish `version` of `model_dir` again, under the next number. No version is removed.

    Files are hard links where the file system has them, and copies elsewhere. Those in assets.extra are always copies,
    because people edit them. A graph that maps tables from its own folder maps them from the new one.

    Args:
        model_dir: a folder of a disk.
        version: its number; None for the one before the newest.

    Raises:
        ConfigError: `model_dir` is not a folder of this machine, or has fronts, whose rows are in Redis;
            it has no such version, or only one; `version` is the newest,
            or incomplete; it is None, and the newest is incomplete.
        ExportError: `model_dir` cannot be changed. Nothing was published.
    """
    folder = local_model_dir(model_dir, "roll back")
    check_has_rows(folder, "roll back")
    locks: list[int] = []
    with naming_model_dir(folder):
        try:
            with locked(folder):
                paths = dict(version_folders(folder))
                source, newest = _choose(folder, paths, version), max(paths)
                staging = folder / f"{PREFIX}{next_version(folder)}-{secrets.token_hex(4)}"
                staging.mkdir()
                # Exporters leave a locked staging folder alone, and no prune removes a version with a shared lock.
                locks += [lock_folder(staging), lock_folder(paths[source], fcntl.LOCK_SH)]
            try:
                path = _publish(paths[source], staging / "version", folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        finally:
            for lock in locks:
                os.close(lock)
    return RollbackReport(path=path, version=int(path.name), source=source, newest=newest)


def _choose(folder: Path, paths: dict[int, Path], version: int | None) -> int:
    newest = sorted(paths)
    if version is None and len(newest) == 1:
        raise ConfigError(
            f"MODEL_DIR {folder}: version {newest[0]} is the only one, so there is none to go back to. Export again."
        )
    if version is None and not is_loadable(paths[newest[-1]]):
        raise ConfigError(
            f"MODEL_DIR {folder}: version {newest[-1]}, the newest, is incomplete, so servers serve an older one. Name the "
            "version to publish again."
        )
    chosen = newest[-2] if version is None else version
    if chosen not in paths:
        raise ConfigError(
            f"MODEL_DIR {folder}: has no version {chosen}. It has {', '.join(map(str, newest))}. Choose one of these."
        )
    if chosen == newest[-1]:
        raise ConfigError(f"MODEL_DIR {folder}: version {chosen} is the newest already. Choose an older one.")
    if not is_whole(paths[chosen]):
        manifest = Manifest.read(paths[chosen])
        if manifest:
            check_sizes(paths[chosen], manifest)  # raises, and names the file
        raise ConfigError(f"MODEL_DIR {folder}: version {chosen} has no {GRAPH_FILE}. Choose another version.")
    return chosen


def _publish(source: Path, target: Path, model_dir: Path) -> Path:
    manifest = Manifest.read(source)
    root = _mapped_root(source, manifest) if manifest and manifest.layout == "mmap" else None
    for place, _, names in os.walk(source, followlinks=True):
        inside = Path(place).relative_to(source)
        (target / inside).mkdir()
        for name in names:
            real = os.path.realpath(
                Path(place, name)
            )  # a link to a symbolic link would name a file relative to another folder
            if inside.parts[:1] == MANIFEST_PATH.parts[:1]:
                shutil.copy2(real, target / inside / name)
            else:
                link_or_copy(real, target / inside / name)

    def settle(name: str) -> None:
        if manifest and root is not None:
            graph = (source / GRAPH_FILE).read_bytes()
            replace_file(target / GRAPH_FILE, mapped_from(graph, manifest, root / name))

    return publish_folder(target, model_dir, None, settle)


def _mapped_root(source: Path, manifest: Manifest) -> PurePosixPath:
    """Return MODEL_DIR as the graph of `source` names it.

    Raises:
        ConfigError: the graph does not map the tables of its own version.
    """
    folders = mapped_folders((source / GRAPH_FILE).read_bytes(), manifest)
    folder = PurePosixPath(next(iter(folders)))
    if len(folders) > 1 or folder.name != source.name:
        raise ConfigError(
            f"version {source}: its graph maps tables from {', '.join(sorted(folders))}, not from a folder {source.name}. "
            "Relocate it first: tpuembed relocate VERSION ROOT."
        )
    return folder.parent
