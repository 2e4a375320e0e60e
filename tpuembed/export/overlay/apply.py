"""Makes a version of a delta package and its base, beside any server. It imports no TensorFlow."""

import contextlib
import dataclasses
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpuembed.config.checks import check_count
from tpuembed.errors import ConfigError, ExportError, warn
from tpuembed.export.formatting import format_bytes
from tpuembed.export.overlay.changes import write_words
from tpuembed.export.overlay.compact import write_full
from tpuembed.export.overlay.package import (
    PackageIndex,
    ids_file,
    packages_in,
    pull_file,
    read_index,
    read_key,
)
from tpuembed.export.publish.folder import lock_folder, publish_folder, temporary_staging
from tpuembed.export.publish.layouts import choose_layout
from tpuembed.export.publish.version_writer import naming_model_dir
from tpuembed.export.retention.listing import fault_of, version_folders
from tpuembed.export.retention.prune import prune_after
from tpuembed.export.stream.shard import ignore
from tpuembed.files import FilePath, as_path
from tpuembed.files.links import link_or_clone
from tpuembed.manifest import MANIFEST_PATH, BaseEntry, Manifest
from tpuembed.saved_model import PACKAGE_INDEX, file_crc32c

__all__ = ["ApplyReport", "apply_package", "newest_package"]

_SPARE: Final = 1.1
"""Free space that is left over after an application, as a factor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApplyReport:
    """The result of `apply_package`.

    Attributes:
        path: of the new version.
        version: its number, which is the package's.
        base: the version that it was made of.
        materialised: it is a full version.
        bytes_pulled: bytes of the package.
        removed: versions that `keep` removed.
        is_new: False if MODEL_DIR had the version of this package already. Then nothing was done.
    """

    path: Path
    version: int
    base: int
    materialised: bool = False
    bytes_pulled: int = 0
    removed: tuple[int, ...] = ()
    is_new: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**dataclasses.asdict(self), "path": str(self.path)}


def newest_package(place: str | FilePath) -> FilePath | None:
    """Return the package at `place`: itself, or the one with the highest number in a folder of packages; None if there
    is none.

    Raises:
        ConfigError: `place` cannot be listed.
    """
    folder = as_path(place)
    try:
        if (folder / PACKAGE_INDEX).is_file():
            return folder
        for number in reversed(packages_in(folder)):
            if (folder / str(number) / PACKAGE_INDEX).is_file():
                return folder / str(number)
    except OSError as error:
        raise ConfigError(f"package {place}: cannot be listed: {error.strerror}.") from None
    return None


def apply_package(
    package: str | FilePath,
    model_dir: str | FilePath,
    *,
    materialise: bool = False,
    trusted_key: str | Path | None = None,
    serving_root: str | None = None,
    keep: int | None = None,
    on_progress: Callable[[int, int], None] = ignore,
) -> ApplyReport:
    """Make the version of a delta package in `model_dir`, from the package and its base there.

    The package's files are compared with their checksums, and the base with the fingerprint that the package names. The
    version appears by one rename.

    Args:
        package: a package, or a folder or URL of packages, of which the newest is taken.
        model_dir: a folder of a disk that has the base.
        materialise: write a full version instead of an overlay that links the base's files.
        trusted_key: a file with the key that the package must be signed with; None accepts any package.
        serving_root: for a package of layout mmap: MODEL_DIR as the server sees it; None for `model_dir`.
        keep: then remove all versions but the newest `keep`, see `prune_versions`. The package's base stays: the next
            packages need it.
        on_progress: called with (bytes done, bytes in total).

    Raises:
        ConfigError: there is no package, `keep` is below 1, or `model_dir` is no folder of this machine.
        ExportError: the package is damaged, not signed, or for another base; another version has its number; or there
            is no room. Nothing was published.
    """
    if keep is not None:
        check_count("keep", keep)
    folder = as_path(model_dir)
    if not isinstance(folder, Path) or not folder.is_dir():
        raise ConfigError(f"MODEL_DIR {folder}: is not a folder of this machine. Name the folder that has the base.")
    found = newest_package(package)
    if found is None:
        raise ConfigError(f"package {package}: has no {PACKAGE_INDEX}, and no package is in it. Name a package.")
    key = None if trusted_key is None else read_key(trusted_key)
    with naming_model_dir(folder):
        index = read_index(found, key)
        if index is None:
            raise ConfigError(f"package {found}: has no {PACKAGE_INDEX}. Name a package.")
        there = dict(version_folders(folder)).get(index.version)
        if there is not None:
            number = _base_if_applied(found, index, there)
            return ApplyReport(path=there, version=index.version, base=number, is_new=False)
        newest = max((number for number, _ in version_folders(folder)), default=0)
        if index.version < newest:
            warn(
                f"package {found}: MODEL_DIR {folder} has version {newest}, which servers of the newest version go on serving. "
                f"Write packages with numbers above {newest}: tpuembed export --version."
            )
        with temporary_staging(folder, "apply", str(index.version)) as staging:
            _check_room(folder, index)
            version = staging / "package"
            done = 0
            for name, entry in index.files.items():
                pull_file(found, name, entry, version / name)
                done += entry.size
                on_progress(done, index.size)
            manifest = _read_manifest(found, version)
            _check_files(found, manifest, index)
            with _locked_base(found, folder, manifest) as base:
                local = _local(found, manifest, base)
                _complete(found, version, local, base, materialise=materialise)
                if materialise:
                    subject = f"package {found}: its base {base} is damaged"
                    path, _ = write_full(version, local, staging, folder, serving_root, index.version, subject=subject)
                else:
                    path = _publish(version, local, folder, serving_root, index.version)
        removed: tuple[int, ...] = ()
        if keep is not None:
            in_use = {int(base.name): "the base of the newest package", index.version: "just applied"}
            removed = prune_after(folder, keep=keep, version=index.version, in_use=in_use)
    return ApplyReport(
        path=path,
        version=index.version,
        base=int(base.name),
        materialised=materialise,
        bytes_pulled=index.size,
        removed=removed,
    )


def _base_if_applied(package: FilePath, index: PackageIndex, version: Path) -> int:
    """Return the base of a package that `version` was made of.

    Raises:
        ExportError: `version` is another one, such as one that a rollback made. It has another checkpoint.
    """
    with tempfile.TemporaryDirectory() as folder:
        name = MANIFEST_PATH.as_posix()
        pull_file(package, name, index.files[name], Path(folder) / name)
        wanted = _read_manifest(package, Path(folder))
    with contextlib.suppress(ConfigError):  # a manifest that cannot be read is none of this package
        own = Manifest.read(version)
        if own is not None and (own.source, own.signatures) == (wanted.source, wanted.signatures):
            assert wanted.base is not None
            return wanted.base.version if own.base is None else own.base.version
    raise ExportError(
        f"package {package}: {version} is another version of that number, which a rollback, compact or another export made. "
        "Apply a package with a higher number."
    )


def _check_room(model_dir: Path, index: PackageIndex) -> None:
    free, needed = shutil.disk_usage(model_dir).free, int(index.size * _SPARE)
    if free < needed:
        raise ExportError(
            f"MODEL_DIR {model_dir}: package {index.version} needs {format_bytes(needed)} ({needed} bytes), a tenth to spare "
            f"included, but its disk has {format_bytes(free)} ({free} bytes) free. Free space."
        )


def _read_manifest(package: FilePath, version: Path) -> Manifest:
    try:
        manifest = Manifest.read(version)
    except ConfigError as error:
        text = str(error).replace(str(version), str(package))
        raise ExportError(f"package {package}: {text}") from None
    if manifest is None or manifest.base is None:
        raise ExportError(f"package {package}: its manifest names no base. Write the package again.")
    return manifest


def _check_files(package: FilePath, manifest: Manifest, index: PackageIndex) -> None:
    """Raise ExportError unless the package has the files that its manifest names, and no others."""
    linked = {stack.file for stack in manifest.stacks if stack.base_file}
    rebuilt = {array.file for stack in manifest.stacks if stack.overlay for array in stack.arrays[2:]}
    ids = {ids_file(stack.name) for stack in manifest.stacks if stack.overlay}
    named = {"assets.extra/tpuembed.json", *manifest.files, *manifest.table_files(), *ids} - linked - rebuilt
    if named != index.files.keys():
        other = sorted(named ^ index.files.keys())
        raise ExportError(
            f"package {package}: manifest and {PACKAGE_INDEX} name other files: {', '.join(other)}. Write the package again."
        )


@contextlib.contextmanager
def _locked_base(package: FilePath, model_dir: Path, manifest: Manifest) -> Iterator[Path]:
    """Yield the version in `model_dir` with the fingerprint of the package's base. No prune removes it meanwhile."""
    assert manifest.base is not None
    wanted, seen = manifest.base.fingerprint, []
    for number, path in sorted(version_folders(model_dir), key=lambda found: found[0] != manifest.base.version):  # type: ignore[union-attr]
        try:
            own = Manifest.read(path)
            if own is None or own.base is not None:
                continue
            fault = fault_of(path, own)
        except ConfigError:
            seen.append(f"{number}, whose manifest cannot be read")
            continue
        if own.tables_fingerprint == wanted:
            if fault:
                raise ExportError(f"package {package}: its base {path} is damaged: {fault}. Copy the base there again.")
            try:
                lock = lock_folder(path, fcntl.LOCK_SH)
            except FileNotFoundError:
                continue
            try:
                yield path
                return
            finally:
                os.close(lock)
        seen.append(f"{number} with {own.tables_fingerprint}")
    raise ExportError(
        f"package {package}: its base is version {manifest.base.version} with the fingerprint {wanted}. MODEL_DIR {model_dir} "
        f"has {', '.join(seen) or 'no full version'}. Copy the base there, or write a package for a base that is there."
    )


def _local(package: FilePath, manifest: Manifest, base: Path) -> Manifest:
    """Return the manifest with the number and the file names that the base has here."""
    own = Manifest.read(base)
    assert own is not None
    assert manifest.base is not None
    files = {stack.name: stack.file for stack in own.stacks}
    missing = [stack.name for stack in manifest.stacks if stack.base_file and stack.name not in files]
    if missing:
        raise ExportError(f"package {package}: its base {base} has no stack {missing[0]!r}. Write the package again.")
    stacks = tuple(
        dataclasses.replace(stack, base_file=files[stack.name]) if stack.base_file else stack
        for stack in manifest.stacks
    )
    return dataclasses.replace(
        manifest, stacks=stacks, base=BaseEntry(version=int(base.name), fingerprint=manifest.base.fingerprint)
    )


def _complete(package: FilePath, version: Path, manifest: Manifest, base: Path, *, materialise: bool) -> None:
    """Link the base's files into `version`, and write the words of every overlay.

    If `version` is to be materialised, the links are symbolic: the file system may have no others.

    Raises:
        ExportError: the rows of an overlay do not fit their stack, or a file has another checksum than the manifest says.
    """
    for stack in manifest.stacks:
        if stack.base_file:
            target = version / stack.file
            target.parent.mkdir(parents=True, exist_ok=True)
            source = base / stack.base_file
            if materialise:
                target.symlink_to(source.resolve())
            else:
                link_or_clone(source, target)
        if stack.overlay is None:
            continue
        path = version / ids_file(stack.name)
        if path.stat().st_size != 8 * stack.overlay.rows.rows:
            raise ExportError(
                f"package {package}: stack {stack.name!r} has {path.stat().st_size // 8} row numbers for "
                f"{stack.overlay.rows.rows} rows. Write the package again."
            )
        ids = np.memmap(path, np.int64, "r")
        if ids[0] < 0 or ids[-1] >= stack.rows or not _ascend(ids):
            raise ExportError(
                f"package {package}: stack {stack.name!r}: its row numbers are not sorted, or not inside its {stack.rows} rows. "
                "Write the package again."
            )
        write_words(ids, stack.rows, version / stack.overlay.words.file)
        for array in stack.arrays[1:]:
            found = file_crc32c(version / array.file)
            if found != array.crc32c:
                raise ExportError(
                    f"package {package}: {array.name} has the CRC32C {found:#010x}, and the manifest has "
                    f"{array.crc32c:#010x}. Write the package again."
                )
    for stack in manifest.stacks:
        (version / ids_file(stack.name)).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other files are in it, or it does not exist
        (version / "overlay").rmdir()
    manifest.write(version)


def _ascend(ids: Any) -> bool:
    """Returns True if every number is above the one before, in pieces of bounded memory."""
    step = 1 << 22
    return all((np.diff(ids[start : start + step + 1]) > 0).all() for start in range(0, len(ids) - 1, step))


def _publish(version: Path, manifest: Manifest, model_dir: Path, serving_root: str | None, number: int) -> Path:
    layout = choose_layout(manifest.layout, model_dir, serving_root)
    return publish_folder(version, model_dir, number, lambda name: layout.settle(version, manifest, name))
