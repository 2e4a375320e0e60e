"""Finds the version that an export is written for, and checks that it has the same tables."""

import dataclasses
from pathlib import Path

from tpuembed.errors import ConfigError
from tpuembed.export.options import LATEST, BaseOption
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.retention.listing import is_loadable, is_whole, version_folders
from tpuembed.manifest import BaseEntry, Manifest

__all__ = ["BaseVersion", "difference", "find_base"]


@dataclasses.dataclass(frozen=True)
class BaseVersion:
    """A version that has all of its rows in its own files.

    Attributes:
        path: its folder.
        manifest: of it.
    """

    path: Path
    manifest: Manifest

    @property
    def number(self) -> int:
        """Return its version."""
        return int(self.path.name)

    @property
    def entry(self) -> BaseEntry:
        """Return it as the manifest of an overlay names it."""
        return BaseEntry(version=self.number, fingerprint=self.manifest.tables_fingerprint)


def find_base(model_dir: Path, base: BaseOption) -> BaseVersion | str:
    """Return the base in `model_dir`. The base of an overlay is that overlay's own.

    Args:
        model_dir: a folder of this machine, which may not exist yet.
        base: "latest" for the newest complete version, or a number.

    Returns:
        The base. If `base` is "latest" and there is none: the reason, as a sentence without its full stop.

    Raises:
        ConfigError: the version `base` does not exist, is incomplete, or was not written by tpuembed; or the base that
            an overlay names is missing, or is another one than it was.
    """
    folders = dict(version_folders(model_dir)) if model_dir.is_dir() else {}
    if base == LATEST:
        newest = next(
            (folders[number] for number in sorted(folders, reverse=True) if is_loadable(folders[number])), None
        )
        if newest is None:
            return f"MODEL_DIR {model_dir} has no complete version yet"
        found, named = newest, f"latest, which is version {newest.name},"
    else:
        if base not in folders:
            has = ", ".join(map(str, sorted(folders))) or "none"
            raise ConfigError(f"base {base}: MODEL_DIR {model_dir} has no such version. It has {has}.")
        found, named = folders[int(base)], f"{base}"
        if not is_whole(found):
            raise ConfigError(f"base {base}: version {found} is incomplete. Name a complete one.")
    manifest = Manifest.read(found)
    if manifest is None:
        if base == LATEST:
            return f"version {found.name} was not exported by tpuembed"
        raise ConfigError(f"base {named}: it was not exported by tpuembed. Name a version that was.")
    if manifest.base is None:
        return BaseVersion(found, manifest)
    below = folders.get(manifest.base.version)
    own = Manifest.read(below) if below is not None and is_loadable(below) else None
    if below is None or own is None or own.tables_fingerprint != manifest.base.fingerprint:
        fault = "is not there" if own is None else f"has the fingerprint {own.tables_fingerprint}"
        text = (
            f"version {found.name} was written for version {manifest.base.version} with the fingerprint "
            f"{manifest.base.fingerprint}, which {fault}"
        )
        if base == LATEST:
            return text
        raise ConfigError(f"base {named}: {text}. Leave base out for a full version.")
    return BaseVersion(below, own)


def difference(plan: ExportPlan, base: BaseVersion) -> str:
    """Return why `plan` cannot be an overlay of `base`, as a sentence without its full stop. Empty if it can."""
    if base.manifest.row_store is not None:
        return f"version {base.number} has its rows in Redis"
    planned = {stack.name for stack in plan.stacks}
    entries = {stack.name: stack for stack in base.manifest.stacks}
    if planned != entries.keys():
        return (
            f"version {base.number} has the stacks {', '.join(sorted(entries))}, and the export has "
            f"{', '.join(sorted(planned))}"
        )
    tables, version = {table.name: table for table in base.manifest.tables}, base.number
    for stack in plan.stacks:
        entry = entries[stack.name]
        if entry.offset or (entry.dim, entry.storage) != (stack.dim, stack.storage):
            return f"version {version} stores stack {stack.name} in another form"
        theirs = {name for name, table in tables.items() if table.stack == stack.name}
        mine = {place.table for place in stack.tables}
        if theirs != mine:
            return f"version {version} has other tables: {', '.join(sorted(theirs ^ mine))}"
        for place in stack.tables:
            table = tables[place.table]
            if table.rows != place.rows:
                return (
                    f"table {place.table!r} has {table.rows} rows in version {version}, and {place.rows} in the export"
                )
            before = None if table.quantization is None else dataclasses.asdict(table.quantization)
            if before != place.quantization:
                return (
                    f"table {place.table!r} is quantized to {place.quantization}, and to {before} in version {version}"
                )
    return ""
