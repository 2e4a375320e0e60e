"""Chooses the vocabulary of each table that features look up in by name: the given names, or those of the checkpoint."""

import dataclasses
import functools
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Final

from tpuembed.errors import ConfigError
from tpuembed.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tpuembed.export.graph.signature import ServedFeature

__all__ = ["Saved", "vocabulary_of", "with_names"]

_ROWS_AT_ONCE: Final = 1 << 16
Saved = Callable[[str], Vocabulary | None]
"""Returns the vocabulary that a checkpoint has for a table, or None."""


def with_names(
    features: "Sequence[ServedFeature]", saved: Saved, trained_with_rows: Container[tuple[str, str]] = ()
) -> "tuple[ServedFeature, ...]":
    """Return `features` with the names of their tables, where they take names. Features of one table share them.

    Args:
        features: what was asked for.
        saved: returns the checkpoint's vocabulary of a table, or None.
        trained_with_rows: name and table of the layer's features that took row numbers.

    Raises:
        ConfigError: a vocabulary is none of its table, two of one table differ, or a list's padding is a name.
    """
    saved = functools.cache(saved)
    found: dict[str, Vocabulary] = {}
    named = {}
    for feature in sorted(features, key=lambda each: not each.spec.vocabulary):  # those with names first
        given, table, where = feature.spec.vocabulary, feature.table, f"feature {feature.name!r}"
        if given is None and not feature.spec.takes_rows and (feature.name, table) not in trained_with_rows:
            given = saved(table)
        if given is None:
            continue
        chosen = vocabulary_of(where, given, table, feature.rows, found.get if table in found else saved)
        found[table] = chosen
        padding = b"" if chosen.dtype == "string" else -1
        if feature.spec.input == "ids" and chosen.has(padding):
            raise ConfigError(
                f"{where}: the vocabulary of table {table!r} has the name {padding!r}, which is the padding of lists. Serve "
                'one name per row with input "id", or train without that name.'
            )
        named[feature.name] = dataclasses.replace(feature, spec=dataclasses.replace(feature.spec, vocabulary=chosen))
    return tuple(named.get(feature.name, feature) for feature in features)


def vocabulary_of(where: str, given: Vocabulary, table: str, rows: int, saved: Saved) -> Vocabulary:
    """Return the vocabulary of a table that a feature looks up in by name.

    Args:
        where: begins the messages of errors.
        given: of the feature. Without names it stands for the checkpoint's.
        table: its name.
        rows: of the table.
        saved: returns the checkpoint's vocabulary of a table, or None.

    Raises:
        ConfigError: there is none, the given one differs from the checkpoint's, or the table has not enough rows for it.
    """
    found = saved(table)
    if found is None and not len(given):
        raise ConfigError(
            f"{where}: its vocabulary has no names, and the checkpoint has none for table {table!r}. Give the names: "
            "Vocabulary.from_file, or file in a serving_config."
        )
    if found is not None:
        _check_same(where, given, found, table)
    found = given if found is None else found
    if not len(found):
        raise ConfigError(
            f"{where}: the vocabulary of table {table!r} in the checkpoint has no names. Train with names, or serve row numbers "
            "with takes_rows: true."
        )
    if found.rows > rows:
        raise ConfigError(
            f"{where}: its vocabulary has {len(found)} names and {found.oov_buckets} buckets, but table {table!r} has "
            f"{rows} rows. Give the vocabulary that the table was trained with."
        )
    return found


def _check_same(where: str, given: Vocabulary, saved: Vocabulary, table: str) -> None:
    if unlike := given.unlike(saved):
        option, own, its = unlike
        raise ConfigError(
            f"{where}: its vocabulary has {option} {own}, but that of table {table!r} has {its}. Give the one that the table was "
            "trained with."
        )
    if len(given) and not given.same_names(saved):
        row, own, other = _first_difference(given, saved)
        raise ConfigError(
            f"{where}: its vocabulary has {len(given)} names, and that of table {table!r} has {len(saved)}. Row {row} is {own} in "
            f"the first and {other} in the second. Leave the names out to take those of the checkpoint."
        )


def _first_difference(one: Vocabulary, other: Vocabulary) -> tuple[int, str, str]:
    """Return the first row with different names in two vocabularies of the same buckets, and what each has there."""

    def shown(vocabulary: Vocabulary, row: int) -> str:
        name = vocabulary.names([row])[0] if row < vocabulary.rows else None
        return "free" if name is None else repr(name)

    row = common = min(one.rows, other.rows)
    for start in range(one.oov_buckets, common, _ROWS_AT_ONCE):
        rows = range(start, min(start + _ROWS_AT_ONCE, common))
        names, others = one.names(rows), other.names(rows)
        if names != others:
            row = next(row for row, own, its in zip(rows, names, others, strict=True) if own != its)
            break
    return row, shown(one, row), shown(other, row)
