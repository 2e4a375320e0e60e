"""The message for an id outside its table. Graphs and native lookups report the same one."""

from typing import Final, NamedTuple

__all__ = [
    "MOST_OF_NAME",
    "NOWHERE",
    "OF_ROW",
    "Span",
    "outside_message",
    "outside_texts",
    "unknown_name_texts",
    "unknown_texts",
]


class Span(NamedTuple):
    """The valid ids of a table: [0, rows)."""

    table: str
    rows: int


NOWHERE: Final = 1 << 62
"""The row of an unknown name, past the end of every table."""
_LONGEST: Final = 199
MOST_OF_NAME: Final = 24
"""Bytes of a name in messages. Longer ones are cut."""
OF_ROW: Final = " of row "
"""The text between the id and the row."""
_DIGITS: Final = len(str(-(2**63))) + len(OF_ROW) + len(str(2**31))


def outside_message(feature: str, span: Span, found: int, row: int) -> str:
    """Return the message for the id `found` of the batch row `row`, which is outside `span`."""
    before, after = outside_texts(feature, span)
    return f"{before}{found}{OF_ROW}{row}{after}"


def outside_texts(feature: str, span: Span) -> tuple[str, str]:
    """Return the message for an id outside `span`, as the texts before the id and after the row: at most 199 characters in all."""
    room = _LONGEST - _DIGITS - sum(map(len, _texts("", "", span, "")))
    shown, table, remedy = _fitted(feature, span.table, room, "; correct the id or set out_of_vocabulary")
    return _texts(shown, table, span, remedy)


def _texts(feature: str, table: str, span: Span, remedy: str) -> tuple[str, str]:
    return f"feature {feature}: id ", f" is not in table {table}, which has {span.rows} rows{remedy}"


def unknown_name_texts(feature: str, table: str, count: int) -> tuple[str, str, str]:
    """Return the message for an unknown name, as the texts before the name, between it and the row, and after the row.

    It has at most 199 characters in all, with MOST_OF_NAME of the name.
    """
    names = "1 name" if count == 1 else f"{count} names"
    texts = ("feature ", ": name '", f"'{OF_ROW}", " is not in the vocabulary of table ", f", which has {names}")
    room = _LONGEST - sum(map(len, texts)) - MOST_OF_NAME - len("...") - len(str(2**31))
    shown, table, remedy = _fitted(feature, table, room, "; correct the name or set out_of_vocabulary")
    return f"{texts[0]}{shown}{texts[1]}", texts[2], f"{texts[3]}{table}{texts[4]}{remedy}"


def unknown_texts(feature: str, table: str) -> tuple[str, str]:
    """Return the message for NOWHERE, an unknown name that is not at hand, as `outside_texts` does for ids."""
    texts = ("feature ", ": a name", OF_ROW, " is not in the vocabulary of table ")
    room = _LONGEST - sum(map(len, texts)) - len(str(2**31))
    shown, table, remedy = _fitted(feature, table, room, "; correct the name, or set oov_buckets or out_of_vocabulary")
    return f"{texts[0]}{shown}{texts[1]}", f"{texts[3]}{table}{remedy}"


def _fitted(feature: str, table: str, room: int, remedy: str) -> tuple[str, str, str]:
    """Return both names and the remedy in `room` characters: without the remedy, and shortened, if they are longer."""
    if len(feature) + len(table) > room - len(remedy):
        remedy = ""
    room -= len(remedy)
    of_feature = min(len(feature), max(room - len(table), room // 2))
    return _shortened(feature, of_feature), _shortened(table, min(len(table), room - of_feature)), remedy


def _shortened(name: str, room: int) -> str:
    if len(name) <= room:
        return name
    head = (room - 3) // 2
    return f"{name[:head]}...{name[len(name) - (room - 3 - head) :]}"
