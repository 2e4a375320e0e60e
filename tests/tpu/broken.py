"""Deliberately broken variants of the layer, and the check that must catch each."""

import contextlib
from collections.abc import Iterator

__all__ = ["breaking"]


@contextlib.contextmanager
def breaking(name: str) -> Iterator[None]:
    """The layer with what is broken in it."""
    yield
