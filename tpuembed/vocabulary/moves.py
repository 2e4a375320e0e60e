"""The new number of each row of a table that gets another vocabulary, and which names are kept, new and dropped."""

import dataclasses
from typing import Any, Final

import numpy as np

from tpuembed.vocabulary.vocabulary import Vocabulary

__all__ = ["NamesPlan"]

Array = np.ndarray[Any, Any]

_EXAMPLES: Final = 5


@dataclasses.dataclass(frozen=True)
class NamesPlan:
    """What happens to the rows of a table that gets another vocabulary.

    Attributes:
        kept: number of names of both, whose rows move to their new numbers.
        new: number of names of the new vocabulary alone.
        dropped: number of names of the old vocabulary alone, whose rows are omitted.
        new_names, dropped_names: the first of them.
        buckets: number of rows for unknown names, in the old and in the new vocabulary. They are kept if it is the same.
        numbers: int64 [rows with a name or bucket], the new number of each row; negative if it is omitted.
    """

    kept: int
    new: int
    dropped: int
    new_names: tuple[bytes | int, ...]
    dropped_names: tuple[bytes | int, ...]
    buckets: tuple[int, int]
    numbers: Array = dataclasses.field(repr=False, compare=False)

    @classmethod
    def of(cls, old: Vocabulary, new: Vocabulary) -> "NamesPlan":
        """Return the plan of a table whose rows have the names of `old`, and will have those of `new`.

        Raises:
            ConfigError: their names have different dtypes.
        """
        numbers = old.rows_in(new)
        is_dropped = numbers < 0
        is_dropped[: old.oov_buckets] = False
        is_dropped[old.free_rows] = False
        dropped = np.flatnonzero(is_dropped)
        is_new = np.ones(new.rows, bool)
        is_new[: new.oov_buckets] = False
        is_new[new.free_rows] = False
        is_new[numbers[numbers >= 0]] = False
        added = np.flatnonzero(is_new)
        return cls(
            kept=len(old) - len(dropped),
            new=len(added),
            dropped=len(dropped),
            new_names=tuple(new.names(added[:_EXAMPLES])),
            dropped_names=tuple(old.names(dropped[:_EXAMPLES])),
            buckets=(old.oov_buckets, new.oov_buckets),
            numbers=numbers,
        )
