"""The scope in which a `TPUEmbedding` allocates no table: what layer and exporter share.

Inside `deferred_tables(source)` a layer keeps its configuration, its features and its place in the model, and asks
`source` for rows; the exporter binds the rows to stacked variables that are never in memory.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

__all__ = ["TableSource", "current_source", "deferred_tables"]


class TableSource(Protocol):
    """Where a layer inside the scope finds its tables."""

    def register(self, table: Any) -> None:
        """Called once per `TableConfig` when a layer is built.

        Raises:
            TpuEmbedError: the source has no such table, or one of another shape.
        """

    def lookup(self, features: Sequence[Any], tables: Sequence[str]) -> list[Any]:
        """Activations of `features` (`tpuembed.lookup.LookupIds`), each looked up in its table, by name."""

    def table(self, name: str) -> Any:
        """The whole table, float32 [rows, dim], which becomes a tensor where it is used."""


_source: contextvars.ContextVar[TableSource | None] = contextvars.ContextVar("tpuembed_table_source", default=None)


@contextlib.contextmanager
def deferred_tables(source: TableSource) -> Iterator[None]:
    """Layers created inside take their tables from `source`."""
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def current_source() -> TableSource | None:
    """The source of the innermost scope, or None outside of any."""
    return _source.get()
