"""Marks log messages that every worker process has."""

from collections.abc import Mapping
from typing import Final

__all__ = ["ONCE"]

ONCE: Final[Mapping[str, bool]] = {"once": True}
"""The `extra` of a message that all workers log about the same files. Only the first worker writes it."""
