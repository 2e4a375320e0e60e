"""The history of a layer's rows: which trainings it passed through. It says for which bases the stamps of rows hold."""

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Final, Self

from tpuembed.errors import CheckpointCorruptError

__all__ = ["UNKNOWN", "RowHistory"]

UNKNOWN: Final = 2**31 - 1
"""The stamp of updates that are too many for int32. All of them compare as one, so `since` takes no base of them."""
_SHOWN: Final = 80


@dataclasses.dataclass(frozen=True)
class RowHistory:
    """A point in the life of a layer with `track_rows=True`.

    A span is training without a break. A restore begins a span, and so does a write of rows from outside of training.
    Two layers that train on from one checkpoint have spans of their own. So a stamp of one says nothing about the other.

    Attributes:
        spans: (random token, count of updates at which it began) of each span, oldest first.
        updates: the count of updates now.
    """

    spans: tuple[tuple[str, int], ...]
    updates: int

    @staticmethod
    def token() -> str:
        """Return the name of a new span."""
        return secrets.token_hex(8)

    def since(self, base: "RowHistory") -> bool:
        """Return True if this history passed through `base`.

        Then every row that differs from the base's has a stamp above `base.updates`.
        """
        count = len(base.spans)
        if not count or self.spans[:count] != base.spans or base.updates >= UNKNOWN:
            return False
        end = self.spans[count][1] if len(self.spans) > count else self.updates
        return base.spans[-1][1] <= base.updates <= end

    def to_json(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """Return the history, and the shapes of the tables that have stamps beside it, as JSON text."""
        return json.dumps({"spans": self.spans, "updates": self.updates, "shapes": shapes})

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> tuple[Self, dict[str, list[int]]]:
        """Return the history and the shapes, {table: [rows, dim]}, that `to_json` wrote.

        Args:
            text: the JSON.
            where: the place of the text, for messages.

        Raises:
            CheckpointCorruptError: the text is no history.
        """
        try:
            value = json.loads(text)
            spans = tuple((token, start) for token, start in value["spans"])
            counts = [*(start for _, start in spans), value["updates"]]
            shapes = {name: [rows, dim] for name, (rows, dim) in value["shapes"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            spans, counts, shapes = (), [], {}
        numbers = [*counts, *(number for shape in shapes.values() for number in shape)]
        valid = all(type(number) is int and number >= 0 for number in numbers)
        if not spans or not valid or counts != sorted(counts) or not all(type(token) is str for token, _ in spans):
            shown = text if isinstance(text, str) else text.decode(errors="replace")
            shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
            raise CheckpointCorruptError.of(
                f"{where}: the history of its rows is {shown!r}, not spans with counts of updates"
            )
        return cls(spans, counts[-1]), shapes
