"""`tpuembed diff`: the differences between two checkpoints or exports."""

from typing import TYPE_CHECKING, Any

import click

from tpuembed.errors import printable
from tpuembed_cli.command import Command
from tpuembed_cli.options import PATH, options_of
from tpuembed_cli.options import checkpoint_options as options
from tpuembed_cli.output import byte_progress, print_json, table_of, to_terminal

if TYPE_CHECKING:
    from tpuembed.checkpoint.tools import CheckpointDiff, LargestChange, TableDiff

__all__ = ["diff"]


@click.command(
    cls=Command,
    short_help="Compare two checkpoints or exports, row by row.",
    examples=(
        "tpuembed diff checkpoints/ckpt-1 checkpoints/ckpt-2",
        "tpuembed diff checkpoints/ckpt-1 models/rec/1 --json",
    ),
)
@click.argument("first", type=PATH, metavar="A")
@click.argument("second", type=PATH, metavar="B")
@click.option("--slots", is_flag=True, help="Also compare the rows of optimizer slots.")
@options
@options_of("--first-option", "first_options", "The same, for A only.")
@options_of("--second-option", "second_options", "The same, for B only.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def diff(
    first: str,
    second: str,
    slots: bool,
    checkpoint_options: dict[str, str],
    first_options: dict[str, str],
    second_options: dict[str, str],
    as_json: bool,
) -> None:
    """Compare the tables of A and B, checkpoints or exports: names, shapes, dtypes, and every row by value.

    NaN is equal to NaN. A and B may be checkpoints of different formats, or exports (a version, or MODEL_DIR's
    highest). Exits with 0 whether or not they differ.
    """
    from tpuembed.checkpoint.tools import diff_checkpoints

    first_joined, second_joined = (_joined(checkpoint_options, own) for own in (first_options, second_options))
    with byte_progress("diff") as on_progress:
        found = diff_checkpoints(
            first,
            second,
            slots=slots,
            checkpoint_options=first_joined,
            second_options=second_joined,
            on_progress=on_progress,
        )
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)


def _joined(both: dict[str, str], own: dict[str, str]) -> dict[str, str]:
    for name in both.keys() & own.keys():
        raise click.UsageError(f"option {name!r} is given for both checkpoints and for one of them. Give it once.")
    return both | own


def _print(found: "CheckpointDiff") -> None:
    lists = {"added": found.added, "removed": found.removed}
    lists |= {"slots added": found.slots_added, "slots removed": found.slots_removed}
    lines = [printable(f"{what}: {', '.join(names)}") for what, names in lists.items() if names]
    changed = [table for table in found.tables if table.differs]
    same = len(found.tables) - len(changed)
    lines.append(f"{same} of {len(found.tables)} compared are the same")
    to_terminal("\n".join(lines), *([table_of("changed", [_row(table) for table in changed])] if changed else []))


def _row(table: "TableDiff") -> dict[str, Any]:
    return {
        "table": table.name if table.slot is None else f"{table.name}/{table.slot}",
        "shape": _change(*("x".join(map(str, shape)) for shape in table.shapes)),
        "dtype": _change(*table.dtypes),
        "rows changed": f"{table.rows_changed} of {table.rows_compared}",
        "with NaN": table.rows_nan or "",
        "largest L2": _largest(table.largest_l2),
        "largest element": _largest(table.largest_abs),
    }


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def _largest(change: "LargestChange | None") -> str:
    return f"{change.by:.6g} (row {change.row})" if change else ""
