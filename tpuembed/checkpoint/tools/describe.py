"""Describes a checkpoint from its metadata alone, and an export from its manifest alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tpuembed.checkpoint import open_checkpoint
from tpuembed.files import FilePath
from tpuembed.manifest import Manifest

__all__ = ["describe_checkpoint", "describe_export"]


def describe_checkpoint(path: str | FilePath, *, checkpoint_options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what the checkpoint at `path` has, as JSON values. No row and no name is read.

    Its keys are path, format, tables, bytes, and config, if tpuembed layers wrote it. A table has the fields of `TableInfo` and the
    bytes of its rows and slots. It has tracked_updates, if its rows are tracked, and the header of its vocabulary, if it has one.

    Args:
        path: as for `open_checkpoint`.
        checkpoint_options: further arguments of `open_checkpoint`.

    Raises:
        TpuEmbedError: as `open_checkpoint`.
    """
    with open_checkpoint(path, **(checkpoint_options or {})) as checkpoint:
        tables = []
        for info in checkpoint.tables().values():
            size = info.rows * info.dim * info.dtype.itemsize * (1 + len(info.slots))
            table = dataclasses.asdict(info) | {"dtype": str(info.dtype), "bytes": size}
            if stamps := checkpoint.stamps.get(info.name):
                table["tracked_updates"] = stamps.history.updates
            if names := checkpoint.vocabularies.get(info.name):
                table["vocabulary"] = dataclasses.asdict(names.header)
            tables.append(table)
        found = {"path": checkpoint.path, "format": checkpoint.format, "tables": tables}
        found["bytes"] = sum(table["bytes"] for table in tables)
        return found | ({"config": checkpoint.layer_config} if checkpoint.layer_config else {})


def describe_export(version: FilePath, manifest: Manifest) -> dict[str, Any]:
    """Return the manifest of `version` as JSON values, with the bytes and the storage of every table, and the total
    bytes.
    """
    stacks = {stack.name: stack for stack in manifest.stacks}
    tables = []
    for table in manifest.tables:
        stack = stacks[table.stack]
        held = {"storage": stack.storage, "bytes": table.rows * stack.row_bytes}
        tables.append({**dataclasses.asdict(table), **held})
    return {
        "path": str(version),
        "format": "export",
        **dataclasses.asdict(manifest),
        "tables": tables,
        "bytes": sum(array.size for array in manifest.arrays),
    }
