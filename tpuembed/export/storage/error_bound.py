"""The storage errors that shards measured, by table, and the user's bound on them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from tpuembed.errors import ExportError
from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.storage.error import ErrorSums, TableError
from tpuembed.export.storage.formats import is_exact
from tpuembed.export.stream.shard import ShardResult

__all__ = ["ErrorBound", "table_errors"]


def table_errors(shards: Sequence[ShardTask], results: Mapping[int, ShardResult]) -> dict[str, TableError]:
    """Return the error of every table, in the order of `shards`. `results` maps shard indices to results."""
    sums: dict[str, ErrorSums] = defaultdict(ErrorSums)
    for task in shards:
        sums[task.table] += ErrorSums(**results[task.index].errors)
    return {task.table: _error_of(task, sums[task.table]) for task in shards}


def _error_of(task: ShardTask, sums: ErrorSums) -> TableError:
    is_lossless = is_exact(task.source_dtype, task.storage) and not sums.values
    return TableError(storage=task.storage) if is_lossless else TableError.of(task.storage, sums)


class ErrorBound:
    """The bound `max_error`: no looked up value may differ from its float32 value by more."""

    def __init__(self, shards: Sequence[ShardTask], max_error: float | None) -> None:
        self._shards, self._max_error = shards, max_error

    def check_shard(self, result: ShardResult) -> None:
        """Raise ExportError if one shard exceeds the bound, so that a long export fails early."""
        task = self._shards[result.index]
        self._check(task.table, task.storage, result.errors.get("max_abs", 0.0))

    def check(self, errors: Mapping[str, TableError]) -> None:
        """Raise ExportError if a table, reused shards included, exceeds the bound."""
        for table, error in errors.items():
            self._check(table, error.storage, error.max_abs)

    def _check(self, table: str, storage: str, max_abs: float) -> None:
        if self._max_error is not None and max_abs > self._max_error:
            raise ExportError(
                f"table {table!r}: stored as {storage}, a value differs by {max_abs:.3g} from float32, but "
                f"max_error is {self._max_error:g}. Store this table as {_better(storage)}, or raise max_error."
            )


def _better(storage: str) -> str:
    return {"int8": "float16, bfloat16 or float32", "bfloat16": "float16 or float32"}.get(storage, "float32")
