"""Removes old versions. A version disappears from servers by one rename, and is then deleted.

The new name begins with `.pruned-`, which no server reads. The next prune deletes what an interrupted one left there.
"""

import contextlib
import dataclasses
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from tpuembed.config.checks import check_count
from tpuembed.errors import ExportError, TpuEmbedError, warn
from tpuembed.export.publish.folder import abandoned, lock_folder, locked
from tpuembed.export.publish.version_writer import naming_model_dir
from tpuembed.export.retention.listing import (
    bases_of,
    check_has_rows,
    file_bytes,
    is_whole,
    local_model_dir,
    version_folders,
)
from tpuembed.files import FilePath, flush

__all__ = ["InUse", "PruneReport", "prune_after", "prune_versions"]

_PREFIX: Final = ".pruned-"

InUse = Callable[[Collection[int]], Mapping[int, str]]
"""Takes the versions that exist. Returns those that must be kept, each with the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneReport:
    """The result of `prune_versions`.

    Attributes:
        model_dir: the folder.
        kept: the versions that stay, each with the reason.
        removed: the versions that were removed, or would be.
        bytes_freed: bytes of the files of removed versions that no other folder has.
        dry_run: nothing was removed.
    """

    model_dir: Path
    kept: Mapping[int, str]
    removed: tuple[int, ...]
    bytes_freed: int
    dry_run: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        kept = {str(version): why for version, why in self.kept.items()}
        return {**dataclasses.asdict(self), "model_dir": str(self.model_dir), "kept": kept}


def prune_versions(
    model_dir: str | FilePath, *, keep: int = 2, in_use: InUse | None = None, dry_run: bool = False
) -> PruneReport:
    """Remove the versions of `model_dir` but the newest `keep`, those in use, and those that a kept version reads.

    Versions that an export or a rollback is linking files of are kept too. Incomplete versions do not count among the
    newest. One above the newest complete version is kept, because another program may be copying it.

    Args:
        model_dir: a folder of a disk.
        keep: how many versions to keep, at least 1.
        in_use: names versions to keep, such as `tpuembed_serving.versions_in_use` does. None names none.
        dry_run: report, and remove nothing.

    Raises:
        ConfigError: `keep` is below 1, or `model_dir` is not a folder of this machine or has no version; or a version
            that would be kept has a manifest that cannot be read. Nothing was removed.
        ExportError: `model_dir` cannot be changed.
    """
    check_count("keep", keep)
    folder = local_model_dir(model_dir, "prune")
    check_has_rows(folder, "prune")
    # Versions that are published from here on are kept: `in_use` does not know them.
    known = {number for number, _ in version_folders(folder)}
    reasons = dict(in_use(known)) if in_use else {}
    with naming_model_dir(folder):
        with locked(folder):
            kept, leaving = _choose(folder, keep, known, reasons)
            freed, _ = file_bytes(path for _, path in leaving)
            if not dry_run:
                for number, path in leaving:
                    path.rename(folder / f"{_PREFIX}{number}-{secrets.token_hex(4)}")
                flush(folder)
        if not dry_run:
            for path in folder.glob(f"{_PREFIX}*"):  # of this prune, and of interrupted ones
                if path.is_symlink():  # a version may be a link to a folder, which is not ours to delete
                    with contextlib.suppress(FileNotFoundError):  # deleted by another prune
                        path.unlink()
                else:
                    shutil.rmtree(path, ignore_errors=True)
                if path.is_symlink() or path.exists():
                    raise ExportError(
                        f"MODEL_DIR {folder}: {path.name} is out of service, but cannot be deleted. Check its permissions, and "
                        "prune again."
                    )
            for path, lock in abandoned(folder, "compact-"):  # of killed compactions
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
    removed = tuple(sorted({number for number, _ in leaving}))
    return PruneReport(model_dir=folder, kept=kept, removed=removed, bytes_freed=freed, dry_run=dry_run)


def prune_after(model_dir: str | FilePath, *, keep: int, version: int) -> tuple[int, ...]:
    """Remove old versions once `version` is published, and return them. A failure is a warning: the version is there."""
    try:
        return prune_versions(model_dir, keep=keep, in_use=lambda _: {version: "just exported"}).removed
    except TpuEmbedError as error:
        warn(f"version {version} is published, but old versions could not be removed: {error}")
        return ()


def _choose(
    folder: Path, keep: int, known: Collection[int], reasons: Mapping[int, str]
) -> tuple[dict[int, str], list[tuple[int, Path]]]:
    """Return the versions to keep, each with the reason, and the folders of the others. Call it under the lock of MODEL_DIR."""
    folders = version_folders(folder)
    paths = dict(folders)
    kept: dict[int, str] = {}
    newest = 0
    for number in sorted(paths, reverse=True):
        if newest == keep:
            break
        if is_whole(paths[number]):
            newest += 1
            kept[number] = "newest" if newest == 1 else f"one of the newest {keep}"
        elif not newest:
            kept[number] = "incomplete, and above the newest complete version"
    kept |= {number: why for number, why in reasons.items() if number in paths}
    kept |= {number: "published during this prune" for number in paths if number not in known}
    kept |= {number: "an export reads it now" for number, path in folders if number not in kept and _is_read(path)}
    pending = list(kept)
    for number in pending:  # grows while bases are found
        for base in sorted(bases_of(paths[number])):
            if base in paths and base not in kept:
                kept[base] = f"version {number} reads its files"
                pending.append(base)
    return dict(sorted(kept.items())), [(number, path) for number, path in folders if number not in kept]


def _is_read(version_dir: Path) -> bool:
    """Returns True if another process holds a shared lock of the version: see `folder`."""
    try:
        os.close(lock_folder(version_dir, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    return False
