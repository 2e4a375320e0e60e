"""The names of tables in an exported graph: the arrays that find them, in mapped files or in variables."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tpuembed.export.graph.mapped_table import MappedTable
from tpuembed.manifest import NAMES_FOLDER, ArrayEntry, NamesEntry
from tpuembed.vocabulary import WAYS, Vocabulary, salt_text

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
        names = [f"names_{number}_keys", f"names_{number}_numbers"]
        salt, of_index, numbers_of_index = vocabulary.snapshot()  # of a live layer, it may grow meanwhile
        values: list[npt.NDArray[Any]] = [of_index, numbers_of_index.reshape(-1)]
        if layout == "mmap":
            files = [f"{NAMES_FOLDER}/{number}.keys", f"{NAMES_FOLDER}/{number}.numbers"]
            written = tuple(_write(folder, *each) for each in zip(names, files, values, strict=True))
            keys, numbers = (
                MappedTable(name, value.shape, tf.as_dtype(value.dtype), file)
                for name, value, file in zip(names, values, files, strict=True)
            )
        else:
            written = ()
            keys, numbers = (
                tf.Variable(value, trainable=False, name=name) for name, value in zip(names, values, strict=True)
            )
        arrays[table] = TableNames(keys, numbers, len(of_index), salt_text(salt))
        entries.append(
            NamesEntry(
                table=table,
                dtype=vocabulary.dtype,
                count=len(vocabulary),
                oov_buckets=vocabulary.oov_buckets,
                is_keyed=vocabulary.oov_key is not None,
                salt=salt_text(salt).decode(),
                arrays=written,
            )
        )
    return arrays, tuple(entries)


def constant_names(vocabulary: Vocabulary) -> TableNames:
    """Return the names as constants, for a model that runs while it is exported."""
    return TableNames(
        tf.constant(vocabulary.keys),
        tf.constant(vocabulary.numbers.reshape(-1)),
        len(vocabulary.keys),
        vocabulary.salt,
    )


def stand_in_names() -> TableNames:
    """Return arrays without names, for a trace that is thrown away."""
    return TableNames(tf.zeros([1, WAYS], tf.int64), tf.fill([WAYS], -1), 1, b"")


def _write(folder: Path, name: str, file: str, value: npt.NDArray[Any]) -> ArrayEntry:
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    data = np.ascontiguousarray(value)
    with open(path, "wb") as out:
        out.write(data.data)
    return ArrayEntry(
        name=name,
        key="",
        rows=len(data),
        file=file,
        size=data.nbytes,
        crc32c=int(google_crc32c.extend(0, data.reshape(-1).view(np.uint8))),
    )
