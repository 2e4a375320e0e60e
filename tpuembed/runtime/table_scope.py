"""The scope in which a `TPUEmbedding` allocates no table. Layer and exporter share it.

Inside `deferred_tables(source)` a layer keeps its configuration and features, and reads rows from `source`. The
exporter binds the rows to stacked variables that are never in memory.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

__all__ = ["TableSource", "current_source", "deferred_tables"]


class TableSource(Protocol):
    """The source of rows for a layer inside the scope. It raises TpuEmbedError for what it lacks, or has otherwise."""

    def register(self, table: Any) -> None:
        """Register a `TableConfig`. Called once per table when a layer is built."""

    def lookup(self, features: Sequence[Any], tables: Sequence[str]) -> list[Any]:
        """Return the activations of `features` (`tpuembed.lookup.FlatIds`), each looked up in its table, by name."""

    def answer(self, features: Sequence[Any], look_up: Callable[[], list[Any]]) -> list[Any]:
        """Return the activations of `features` (`tpuembed.lookup.Ids`): those of `look_up`, or others in their place."""

    def name_arrays(self, table: str, given: Any = None) -> Any:
        """Return the index of a table's names (`tpuembed.lookup.names.NameArrays`).

        Args:
            table: its name.
            given: the Vocabulary of the feature. Without names, or None, it stands for the source's.
        """

    def note_numbers(self, table: str, feature: str | None = None) -> None:
        """Record that `feature` of a layer's table takes row numbers, and others names. None: all features take numbers."""

    def table(self, name: str) -> Any:
        """Return the whole table, float32 [rows, dim], which converts to a tensor."""


_source: contextvars.ContextVar[TableSource | None] = contextvars.ContextVar("tpuembed_table_source", default=None)


@contextlib.contextmanager
def deferred_tables(source: TableSource) -> Iterator[None]:
    """Make layers take their tables from `source` inside the context."""
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def current_source() -> TableSource | None:
    """Return the source of the innermost scope. Returns None outside of any scope."""
    return _source.get()
