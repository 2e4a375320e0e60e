"""Compares the names that an export is given with the lookup layers of the trained model in a `.keras` file."""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from tpuembed.errors import CheckpointMismatchError, warn
from tpuembed.files import FilePath, as_path
from tpuembed.vocabulary import Vocabulary
from tpuembed.vocabulary.model_files import LayerVocabulary, hashing_of, is_model_file, read_vocabularies

__all__ = ["check_names", "check_names_in", "shown_hashings"]

_NO_LOOKUPS: Final = ("text_vectorization", "discretization")
_REMEDY: Final = (
    "Take them from there with Vocabulary.from_keras, or export with a factory that makes the lookup layer too. If the ids of the "
    "table are from elsewhere, export from a TensorFlow checkpoint or a .weights.h5 file, where names are taken as they are given"
)


def shown_hashings(mine: str | None, saved: str | None, giver: str) -> str:
    """Return both for a message, without the salts, which are secrets."""
    here, there = (re.sub(r"with salt .*", "with a salt", one or "no hash") for one in (mine, saved))
    return f"by {here} in the {giver}, and by {there if here != there else 'one with another salt'} in the file"


def check_names_in(given: Mapping[str, Vocabulary], source: str | FilePath, giver: str) -> None:
    """Compare names with the lookups of the model in `source`, if it is a `.keras` file or its folder; see `check_names`."""
    path = as_path(source)
    if given and is_model_file(path):
        check_names(given, read_vocabularies(path, ())[1], source, giver)


def check_names(
    given: Mapping[str, Vocabulary], saved: Iterable[LayerVocabulary], source: str | FilePath, giver: str
) -> None:
    """Compare the names that a user gives for the rows of tables with the lookups of a trained model.

    The file does not say which lookup made the ids of a table, so a warning names the tables whose names are taken.

    Args:
        given: table -> its names.
        saved: the file's vocabularies.
        source: the file, for messages.
        giver: what gives the names, for messages: "factory" or "serving_config".

    Raises:
        CheckpointMismatchError: the names of a table, or the rows of its unknown names, are those of no lookup of the file.
    """
    lookups = [one for one in saved if one.kind not in _NO_LOOKUPS]
    for table, vocabulary in given.items():
        if not lookups or any(one.entries is None or one.buckets is None for one in lookups):
            continue
        differences = {one.layer: _difference(one, vocabulary, giver) for one in lookups}
        if all(differences.values()):
            shown = "; ".join(f"of layer {layer!r}: {what}" for layer, what in differences.items())
            raise CheckpointMismatchError(
                f"model file {source}: the {giver} gives the names of table {table!r}, {len(vocabulary)} after "
                f"{vocabulary.oov_buckets} rows for unknown ones, and the file has others, {shown}. {_REMEDY}."
            )
    if given:
        tables = f"{'table' if len(given) == 1 else 'tables'} {', '.join(map(repr, given))}"
        warn(
            f"model file {source}: the names that the {giver} gives cannot be compared with the training: the file does not say "
            f"which names the rows of {tables} had. If they differ, the export answers with the rows of other names. Make sure "
            "that they are the same"
        )


def _difference(lookup: LayerVocabulary, given: Vocabulary, giver: str) -> str:
    """Return in what a lookup differs from the names that are given; empty if it has them."""
    assert lookup.entries is not None
    first = given.oov_buckets
    if (lookup.buckets, lookup.described.size) != (first, given.rows):
        before = "a mask" if lookup.buckets == -1 else f"{lookup.buckets} rows for unknown ones"
        return f"{lookup.described.size} entries, with {before} before the names"
    names = given.names(np.arange(first, given.rows))
    for row, (mine, its) in enumerate(zip(names, itertools.islice(lookup.entries(), first, None), strict=True), first):
        if (str(mine).encode() if isinstance(mine, int) else mine) != its:
            return f"row {row} is {its!r} there, and {mine!r} here"
    hashing = hashing_of({"num_oov_indices": first, "vocabulary_dtype": given.dtype})
    return (
        "" if hashing == lookup.hashing else f"rows of unknown names {shown_hashings(hashing, lookup.hashing, giver)}"
    )
