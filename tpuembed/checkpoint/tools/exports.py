"""Exports among the paths that the tools are given."""

from collections.abc import Iterable

from tpuembed.files import FilePath, as_path
from tpuembed.manifest import MANIFEST_PATH, Manifest

__all__ = ["find_export"]


def find_export(path: str | FilePath) -> tuple[FilePath, Manifest] | None:
    """The export at `path` and its manifest: a version, or the highest version of a MODEL_DIR; None for anything else.

    Raises:
        ConfigError: its manifest cannot be read.
    """
    place = as_path(path)
    try:
        version = _version_of(place)
    except OSError:  # which whoever opens it as a checkpoint meets again, and tells
        return None
    manifest = Manifest.read(version) if version else None
    return (version, manifest) if version and manifest else None


def _version_of(path: FilePath) -> FilePath | None:
    if _is_version(path):
        return path
    children: Iterable[FilePath] = path.iterdir() if path.is_dir() else ()
    versions = [child for child in children if child.name.isdecimal()]
    return max(filter(_is_version, versions), key=lambda child: int(child.name), default=None)


def _is_version(path: FilePath) -> bool:
    """Also one that has lost its graph, so that whoever looks into it can say so."""
    return (path / "saved_model.pb").is_file() or (path / MANIFEST_PATH).is_file()
