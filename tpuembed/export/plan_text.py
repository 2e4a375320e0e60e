"""A plan as text for people."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tpuembed.export.units import format_bytes

if TYPE_CHECKING:
    from tpuembed.export.plan import ExportPlan

__all__ = ["describe"]


def describe(plan: "ExportPlan") -> str:
    """A summary, then a line per stack and table."""
    return "\n".join(_description(plan))


def _description(plan: "ExportPlan") -> Iterator[str]:
    tables = sum(len(stack.tables) for stack in plan.stacks)
    yield (
        f"{_count(tables, 'table')} in {_count(len(plan.stacks), 'stack')}, {format_bytes(plan.table_bytes)}, layout "
        f"{plan.layout}: {_count(len(plan.shards), 'shard')} by {_count(plan.workers, 'worker')}, "
        f"{format_bytes(plan.buffer_bytes)} of buffers (at most {format_bytes(plan.max_memory_bytes)})"
    )
    for stack in plan.stacks:
        yield f"  {stack.name}: {stack.storage} [{stack.rows:,}, {stack.dim}], {format_bytes(stack.size)}"
        for table in stack.tables:
            cast = "" if table.source_dtype == stack.storage else f", from {table.source_dtype}"
            levels = "" if table.quantization is None else f", quantized to {table.quantization['num_buckets']} values"
            part = "" if table.is_whole else f" (its rows {table.first_row:,} to {table.first_row + table.rows - 1:,})"
            yield f"    {table.table}: {table.rows:,} rows{part} from row {table.row_offset:,}{cast}{levels}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
