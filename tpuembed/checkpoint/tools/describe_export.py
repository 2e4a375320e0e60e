"""Describes an export from its manifest alone."""

import dataclasses
from typing import Any

from tpuembed.files import FilePath
from tpuembed.manifest import Manifest, StackEntry, TableEntry

__all__ = ["describe_export"]


def describe_export(version: FilePath, manifest: Manifest) -> dict[str, Any]:
    """Return the manifest of `version` as JSON values, with the bytes and the storage of every table, and the total
    bytes.
    """
    stacks = {stack.name: stack for stack in manifest.stacks}
    return {
        "path": str(version),
        "format": "export",
        **dataclasses.asdict(manifest),
        "tables": [_describe(table, stacks[table.stack]) for table in manifest.tables],
        "bytes": sum(stack.size for stack in manifest.stacks),
    }


def _describe(table: TableEntry, stack: StackEntry) -> dict[str, Any]:
    return {
        **dataclasses.asdict(table),
        "storage": stack.storage,
        "bytes": table.rows * (stack.size // stack.rows),
    }
