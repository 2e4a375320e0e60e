"""Shows a plan as text."""

from collections import Counter
from collections.abc import Iterator

from tpuembed.export.formatting import format_bytes, format_seconds
from tpuembed.export.plan.plan import BYTES_PER_SECOND_AND_WORKER, ExportPlan, Placement, StackPlan

__all__ = ["describe"]


def describe(plan: ExportPlan) -> str:
    """Return a summary and an estimate, then a line per stack and table."""
    return "\n".join(_description(plan))


def _description(plan: ExportPlan) -> Iterator[str]:
    tables = sum(len(stack.tables) for stack in plan.stacks)
    yield (
        f"{_count(tables, 'table')} in {_count(len(plan.stacks), 'stack')}, {format_bytes(plan.table_bytes)}, layout "
        f"{plan.layout}: {_count(len(plan.shards), 'shard')} by {_count(plan.workers, 'worker')}, "
        f"{format_bytes(plan.buffer_bytes)} of buffers (at most {format_bytes(plan.max_memory_bytes)})"
    )
    rate = format_bytes(BYTES_PER_SECOND_AND_WORKER)
    yield (
        f"about {format_seconds(plan.estimated_seconds)}, if each worker moves {rate}/s (an assumed rate, not measured)"
    )
    shards = Counter(task.table for task in plan.shards)
    for stack in plan.stacks:
        yield f"  {stack.name}: {stack.storage} [{stack.rows:,}, {stack.dim}], {format_bytes(stack.size)}"
        for table in stack.tables:
            yield f"    {table.table}: {_placed(stack, table, shards[table.table])}"


def _placed(stack: StackPlan, table: Placement, shards: int) -> str:
    first = table.row_offset * stack.row_bytes
    last = first + table.rows * stack.row_bytes - 1
    cast = "" if table.source_dtype == stack.storage else f", from {table.source_dtype}"
    levels = "" if table.quantization is None else f", quantized to {table.quantization['num_buckets']} values"
    part = "" if table.is_whole else f" (its rows {table.first_row:,} to {table.first_row + table.rows - 1:,})"
    return (
        f"{table.rows:,} rows{part} from row {table.row_offset:,}{cast}{levels}; bytes {first:,} to {last:,} in "
        f"{_count(shards, 'shard')}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
