"""Rewrites the paths that an export maps its tables from, so that it can be served from another folder."""

import contextlib
import dataclasses
import os
import secrets
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from tpuembed.errors import ConfigError
from tpuembed.files import flush
from tpuembed.formats.saved_model.mapped_paths import mapped_from
from tpuembed.formats.saved_model.table_files import GRAPH_FILE, check_sizes
from tpuembed.manifest import Manifest

__all__ = ["Relocation", "check_root", "relocate_export", "replace_file"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relocation:
    """The result of `relocate_export`.

    Attributes:
        path: of the version.
        files: name of a stack, or of an overlay's array -> the path that it is now mapped from.
        changed: whether saved_model.pb was rewritten.
        found: whether the new folder exists on this machine, and its files were checked.
    """

    path: Path
    files: dict[str, str]
    changed: bool
    found: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the relocation as JSON values."""
        return {**dataclasses.asdict(self), "path": str(self.path)}


def relocate_export(version_dir: Path, manifest: Manifest, root: str) -> Relocation:
    """Make the export at `version_dir` map its tables from `root`/<name of version_dir>/.

    saved_model.pb is replaced by one rename. If the new folder exists on this machine, the data files must be in it.
    Otherwise it is on another machine, and they must be in `version_dir`. `root` is the absolute MODEL_DIR as the
    serving machine or container sees it.

    Raises:
        ConfigError: the export maps no files, its graph or data files do not match the manifest, or `root` is
            relative.
    """
    check_root(root)
    if manifest.layout != "mmap" or not manifest.arrays:
        cause = f"its layout is {manifest.layout}" if manifest.layout != "mmap" else "its rows are in Redis"
        raise ConfigError(
            f"export {version_dir}: {cause}, so it maps no files and loads from any folder. You can relocate exports of "
            "layout mmap only."
        )
    target = PurePosixPath(root) / version_dir.absolute().name
    found = Path(target).is_dir()
    check_sizes(Path(target) if found else version_dir, manifest)
    try:
        graph = (version_dir / GRAPH_FILE).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"export {version_dir}: {GRAPH_FILE} cannot be read: {error.strerror}. Export again."
        ) from None
    moved = mapped_from(graph, manifest, target)
    if moved != graph:
        replace_file(version_dir / GRAPH_FILE, moved)
    files = {array.name: str(target / array.file) for array in manifest.arrays}
    return Relocation(path=version_dir, files=files, changed=moved != graph, found=found)


def check_root(root: str) -> None:
    """Raise ConfigError unless `root` is absolute. A relative path would depend on the server's working directory."""
    if not PurePosixPath(root).is_absolute():
        raise ConfigError(f"ROOT {root!r} is relative. Give the absolute path of MODEL_DIR as the server sees it.")


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to the file `path` by one rename, so that a reader sees either the old bytes or the new ones.

    Raises:
        OSError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):  # the file is a new one
            shutil.copymode(path, temporary)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)
