"""Describes a checkpoint from its metadata alone, and an export from its manifest alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tpuembed.checkpoint import open_checkpoint
from tpuembed.checkpoint.types import Checkpoint, TableInfo
from tpuembed.files import FilePath
from tpuembed.manifest import Manifest
from tpuembed.vocabulary import VocabularyHeader

__all__ = ["CheckpointDescription", "TableDescription", "describe_checkpoint", "describe_export"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableDescription:
    """A table.

    Attributes:
        name, rows, dim, dtype, slots, layout: as in `TableInfo`, the dtype by name.
        bytes: of its rows and its slots together.
        tracked_updates: the number of updates up to which its rows are tracked; None if they are not.
        vocabulary: the number and dtype of the names of its rows; None if they have none.
    """

    name: str
    rows: int
    dim: int
    dtype: str
    slots: tuple[str, ...]
    layout: str
    bytes: int
    tracked_updates: int | None = None
    vocabulary: VocabularyHeader | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointDescription:
    """A checkpoint.

    Attributes:
        path: opens it again with `open_checkpoint`.
        format: on disk.
        tables: by name.
        bytes: of all tables and slots.
        config: of the tpuembed layers that wrote it; None for others.
    """

    path: str
    format: str
    tables: tuple[TableDescription, ...]
    bytes: int
    config: Mapping[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Return the description as JSON values, without `config`, `tracked_updates` and `vocabulary` if there are none."""
        found = dataclasses.asdict(self)
        for table in found["tables"]:
            for name in ("tracked_updates", "vocabulary"):
                if table[name] is None:
                    del table[name]
        return found if self.config else {key: value for key, value in found.items() if key != "config"}


def describe_checkpoint(
    path: str | FilePath, *, checkpoint_options: Mapping[str, Any] | None = None
) -> CheckpointDescription:
    """Describe the checkpoint at `path`. No row and no name is read.

    Args:
        path: as for `open_checkpoint`.
        checkpoint_options: further arguments of `open_checkpoint`.

    Raises:
        TpuEmbedError: as `open_checkpoint`.
    """
    with open_checkpoint(path, **(checkpoint_options or {})) as checkpoint:
        tables = tuple(_describe(checkpoint, info) for info in checkpoint.tables().values())
        return CheckpointDescription(
            path=checkpoint.path,
            format=checkpoint.format,
            tables=tables,
            bytes=sum(table.bytes for table in tables),
            config=checkpoint.layer_config,
        )


def _describe(checkpoint: Checkpoint, info: TableInfo) -> TableDescription:
    history = checkpoint.row_history(info.name)
    found = {
        "dtype": str(info.dtype),
        "bytes": info.rows * info.dim * info.dtype.itemsize * (1 + len(info.slots)),
        "tracked_updates": None if history is None else history.updates,
        "vocabulary": checkpoint.vocabulary_header(info.name),
    }
    return TableDescription(**dataclasses.asdict(info) | found)


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
