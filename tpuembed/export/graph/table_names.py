"""The names of tables in an exported graph: the arrays that find them, in mapped files or in variables."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from tpuembed.export.graph.mapped_table import store_array
from tpuembed.lookup.name_index import WAYS, NameIndex, salt_text
from tpuembed.manifest import NAMES_FOLDER, NamesEntry
from tpuembed.vocabulary import Vocabulary

__all__ = ["TableNames", "constant_names", "make_names", "stand_in_names"]


@dataclasses.dataclass(frozen=True)
class TableNames:
    """The index of a vocabulary in a graph; see `tpuembed.lookup.names.NameArrays`."""

    keys: Any
    numbers: Any
    buckets: Any
    salt: bytes


def make_names(
    vocabularies: Mapping[str, Vocabulary], folder: Path, layout: str
) -> tuple[dict[str, TableNames], tuple[NamesEntry, ...]]:
    """Return the names of each table for the graph and for the manifest. With layout mmap, write their files into `folder`."""
    arrays: dict[str, TableNames] = {}
    entries = []
    for number, (table, vocabulary) in enumerate(sorted(vocabularies.items())):
        index = NameIndex(vocabulary)
        stored = [
            store_array(value, f"names_{number}_{what}", folder, f"{NAMES_FOLDER}/{number}.{what}", layout)
            for what, value in (("keys", index.keys), ("numbers", index.numbers.reshape(-1)))
        ]
        (keys, _), (numbers, _) = stored
        arrays[table] = TableNames(keys, numbers, len(index.keys), salt_text(index.salt))
        entries.append(
            NamesEntry(
                table=table,
                dtype=vocabulary.dtype,
                count=len(vocabulary),
                oov_buckets=vocabulary.oov_buckets,
                salt=salt_text(index.salt).decode(),
                arrays=tuple(entry for _, entry in stored if entry is not None),
            )
        )
    return arrays, tuple(entries)


def constant_names(vocabulary: Vocabulary) -> TableNames:
    """Return the names as constants, for a model that runs while it is exported."""
    index = NameIndex(vocabulary)
    numbers = tf.constant(index.numbers.reshape(-1))
    return TableNames(tf.constant(index.keys), numbers, len(index.keys), salt_text(index.salt))


def stand_in_names() -> TableNames:
    """Return arrays without names, for a trace that is thrown away."""
    return TableNames(tf.zeros([1, WAYS], tf.int64), tf.fill([WAYS], -1), 1, b"")
