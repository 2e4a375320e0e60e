"""Checkpoints that Orbax wrote for JAX: of keras-rs, of jax-tpu-embedding, and of plain trees."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from tpuembed.checkpoint.orbax.arrays import ArrayStore
from tpuembed.checkpoint.orbax.metadata import OrbaxStep, find_step, is_orbax, metadata_files, read_item
from tpuembed.checkpoint.orbax.stack_specs import given_specs, saved_specs, to_mapping
from tpuembed.checkpoint.orbax.tables import open_tables
from tpuembed.checkpoint.types import Array, Checkpoint
from tpuembed.config.checks import check_count
from tpuembed.errors import CheckpointError, reason
from tpuembed.files import FilePath, versions

__all__ = ["OrbaxCheckpoint"]

_SPEC, _MEMORY = "embedding_spec", "chunk_memory_bytes"


class OrbaxCheckpoint(Checkpoint):
    """A checkpoint written by Orbax.

    Attributes:
        path: of the step's folder, of the item's, or of one of their files if that was named.
        options: embedding_spec as a mapping, chunk_memory_bytes.
    """

    format = "orbax"
    kind: Final = "an Orbax checkpoint"
    accepted_options: Final = frozenset({_SPEC, _MEMORY})
    recognises = staticmethod(is_orbax)

    def __init__(self, step: OrbaxStep, options: Mapping[str, Any]) -> None:
        memory = options.get(_MEMORY)
        if isinstance(memory, str) and memory.isascii() and memory.isdigit() and len(memory) < 20:
            memory = int(memory)  # a command line gives it as text
        if memory is not None:
            check_count(_MEMORY, memory)
            memory = int(memory)
        given = given_specs(options[_SPEC]) if _SPEC in options else None
        self.path = str(step.path)
        self.options: dict[str, Any] = {} if given is None else {_SPEC: to_mapping(given)}
        if memory is not None:
            self.options[_MEMORY] = memory
        self._closed = False
        self._step = step
        self._items = [read_item(folder) for folder in step.items]
        leaves = [leaf for item in self._items for leaf in item.leaves]
        specs = saved_specs(step.protos) if given is None else given
        self._store = ArrayStore(memory)
        self._stored = open_tables(self.path, leaves, specs, self._store)
        self._tables = {name: stored.info for name, stored in self._stored.items()}

    @classmethod
    def open(cls, path: FilePath, options: Mapping[str, Any]) -> Self:
        """Open the checkpoint that `path`, which `recognises` accepts, leads to.

        A chunk is decoded whole, because TensorStore reads no part of one. So a read needs the memory of the largest chunk,
        decoded and as stored. Smaller ones stay in a cache.

        Args:
            path: a folder of steps (the latest), a step, or an item.
            options: `embedding_spec`, how tables are stacked on SparseCores, if the checkpoint does not record it (a
                mapping or a file, see stack_specs); `chunk_memory_bytes`, the memory for a chunk and for the cache.
        """
        opened = cls(find_step(path), options)
        if path.is_file():
            opened.path = str(path)
        return opened

    def close(self) -> None:
        """Close the arrays. Reads afterwards fail."""
        self._closed = True
        self._store.close()

    def _dtype(self, table: str, slot: str | None) -> np.dtype[Any]:
        array = self._stored[table].arrays[slot]
        array.check_chunk()  # raises before memory for the rows is allocated
        return array.dtype

    def _fill(self, table: str, slot: str | None, start: int, out: Array) -> None:
        stored = self._stored[table]
        stored.arrays[slot].read_into(stored.place, start, out)

    def read_buffer_bytes(self, table: str, rows: int) -> int:
        """See Checkpoint.read_buffer_bytes."""
        self._check(table, None)
        return self._stored[table].arrays[None].buffer_bytes() if rows else 0

    def fingerprint(self) -> str:
        """Return a digest of the metadata, and of the sizes and modification times of all files; in a store, of
        metadata files only.
        """
        digest = hashlib.sha256()
        try:
            files = metadata_files(self._step, self._items)
            for path in files:
                digest.update(path.read_bytes())
            for folder in self._step.items:
                if isinstance(folder, Path):  # in a store, every change also renames files in the metadata
                    files += sorted(Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
            digest.update(json.dumps([(version.size, version.tag) for version in versions(files)]).encode())
        except OSError as error:
            raise CheckpointError(f"checkpoint {self.path}: cannot be read any more: {reason(error)}.") from None
        return digest.hexdigest()

    def _check(self, table: str, slot: str | None) -> None:
        if self._closed:
            raise CheckpointError(f"checkpoint {self.path}: is closed. Open it again.")
        super()._check(table, slot)
