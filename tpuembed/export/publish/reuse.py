"""Shares the tables of an existing version in MODEL_DIR by hard links instead of streaming them again.

The same export in the other layout, or with another model around the same tables, differs only in a few files. Each
shared file is read once and compared with its checksum. Removing a version does not harm the versions that share its
files.
"""

import dataclasses
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tpuembed
from tpuembed.errors import ConfigError
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.report import StreamReport
from tpuembed.export.storage.error import TableError
from tpuembed.export.stream.shard import Source
from tpuembed.manifest import Manifest, StackEntry
from tpuembed.saved_model import file_crc32c, size_faults

__all__ = ["SameTables", "find_same_tables", "share_tables", "tables_key"]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SameTables:
    """A version whose data files are identical to those that an export would write."""

    version: Path
    manifest: Manifest


def tables_key(plan: ExportPlan, source: Source) -> str:
    """Return a key that is equal for exports by this version of tpuembed whose data files are the same bytes, in any
    layout. It is empty if `source` does not last, so that its bytes are not known.
    """
    if not source.lasts:
        return ""
    stacks = [dataclasses.asdict(stack) for stack in plan.stacks]
    facts = [tpuembed.__version__, dataclasses.asdict(source), stacks]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def find_same_tables(model_dir: Path, key: str, *, finite: bool = False) -> SameTables | None:
    """Return the newest complete version in `model_dir` whose tables have the key `key`, or None.

    With `finite`, its tables must have been checked for NaN and infinities.
    """
    same = (found for found in _versions(model_dir) if found.manifest.tables_key == key)
    return next((found for found in same if found.manifest.finite or not finite), None)


def _versions(model_dir: Path) -> Iterator[SameTables]:
    folders = [path for path in model_dir.iterdir() if path.name.isdecimal()] if model_dir.is_dir() else []
    for folder in sorted(folders, key=lambda path: int(path.name), reverse=True):
        try:
            manifest = Manifest.read(folder)
        except ConfigError:  # written by another version of tpuembed, or damaged
            continue
        if manifest and not any(size_faults(folder, manifest)):
            yield SameTables(folder, manifest)


def share_tables(
    same: SameTables, plan: ExportPlan, folder: Path, on_progress: Callable[[int, int], None]
) -> StreamReport | None:
    """Create `folder` with links to the data files of `same`. Returns None if a file cannot be shared or is damaged."""
    started, done = time.monotonic(), 0
    stacks = {stack.name: stack for stack in same.manifest.stacks}

    def count(size: int) -> None:
        nonlocal done
        done += size
        on_progress(done, plan.table_bytes)

    shutil.rmtree(folder, ignore_errors=True)  # left by an export that was killed at this step
    folder.mkdir()
    for stack in plan.stacks:
        if not _share(same.version, stacks[stack.name], folder / stack.file, count):
            return None
    return StreamReport(
        folder=folder,
        crc32c={name: stack.crc32c for name, stack in stacks.items()},
        bytes_written=plan.table_bytes,
        bytes_reused=plan.table_bytes,
        errors={table: TableError(**error) for table, error in same.manifest.errors.items()},
        seconds=time.monotonic() - started,
        worker_peak_rss_bytes=0,
    )


def _share(version: Path, stack: StackEntry, target: Path, count: Callable[[int], None]) -> bool:
    try:
        target.hardlink_to(version / stack.file)
        checksum = file_crc32c(target, count)
    except OSError as error:  # the file system has no hard links, or the version was just removed
        logger.info("Version %s: not sharing %s: %s", version.name, stack.file, error.strerror)
        return False
    if checksum != stack.crc32c:
        logger.warning("Version %s: not sharing %s: it is damaged. Verify the version.", version, stack.file)
    return checksum == stack.crc32c
