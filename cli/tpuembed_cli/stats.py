"""`tpuembed stats`: what the rows of tables look like, in figures."""

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpuembed.errors import printable
from tpuembed_cli.command import Command
from tpuembed_cli.options import PATH, complete_tables
from tpuembed_cli.options import checkpoint_options as options
from tpuembed_cli.output import byte_progress, print_json, table_of, to_terminal, with_unit

if TYPE_CHECKING:
    from tpuembed.stats import BadRows, Norms, StorageError, TableStats

__all__ = ["stats"]

_BARS = " ▁▂▃▄▅▆▇█"


@click.command(
    cls=Command,
    short_help="Show NaN, zeros and norms of the rows of tables.",
    examples=(
        "tpuembed stats checkpoints/ckpt-1",
        "tpuembed stats models/rec users --html users.html",
        "tpuembed stats s3://bucket/checkpoints/ckpt-1 --json",
    ),
)
@click.argument("path", type=PATH)
@click.argument("table", required=False, shell_complete=complete_tables)
@options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option(
    "--html", "page", type=click.Path(dir_okay=False, path_type=Path), help="Also write a page with plots to this file."
)
def stats(path: str, table: str | None, checkpoint_options: dict[str, Any], as_json: bool, page: Path | None) -> None:
    """Read every row of TABLE, or of all tables, of the checkpoint or the export at PATH, and describe the rows.

    Shows rows with NaN or infinities, rows of zeros, rows that training never updated, norms, the largest rows,
    and the error that each storage type of an export would make. Exits with 0 whatever it finds.
    """
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # the threads of `read_stats` are enough; numpy is not imported yet
    from tpuembed.stats import read_stats, stats_page

    page = None if page is None else _checked(page)
    with byte_progress("stats") as on_progress:
        found = read_stats(path, table, checkpoint_options=checkpoint_options, on_progress=on_progress)
    if page is not None:
        _write(page, stats_page(found))
    if as_json:
        print_json(found.to_dict())
        return
    for one in found.tables:
        title = f"{one.name}: {one.rows:,} rows of {one.dim} {one.dtype}, {with_unit(one.bytes)}"
        to_terminal("", table_of(printable(title), _lines(one)))


def _lines(table: "TableStats") -> list[dict[str, str]]:
    untouched, norms = table.untouched, table.norms
    found = {
        "with NaN": _bad(table.nan),
        "with infinity": _bad(table.infinite),
        "of zeros": f"{table.zero_rows:,}",
        "untouched": f"unknown: {untouched.reason}" if untouched.count is None else f"{untouched.count:,}",
    }
    if norms is not None:
        found["norm"] = f"mean {norms.mean:.4g}, from {norms.min:.4g} to {norms.max:.4g}"
        found["percentiles"] = ", ".join(f"p{percent} {value:.4g}" for percent, value in norms.percentiles.items())
        if norms.histogram:
            found["histogram"] = _histogram(norms)
        found["largest"] = ", ".join(f"row {one.row}: {one.norm:.4g}" for one in table.largest[:5])
    found |= {f"as {name}": _storage(one) for name, one in table.storage.items()}
    return [{"rows": name, "found": value} for name, value in found.items()]


def _bad(rows: "BadRows") -> str:
    if not rows.count:
        return "0"
    more = ", ..." if rows.count > len(rows.first) else ""
    return f"{rows.count:,}: row {', '.join(map(str, rows.first))}{more}"


def _histogram(norms: "Norms") -> str:
    most = max(one.rows for one in norms.histogram)
    bars = "".join(_BARS[-(-one.rows * (len(_BARS) - 1) // most)] for one in norms.histogram)
    return f"{norms.histogram[0].start:.3g} {bars} {norms.histogram[-1].stop:.3g}"


def _storage(one: "StorageError") -> str:
    return f"refused: {one.reason}" if one.error is None else str(one.error).partition(", ")[2]


def _checked(page: Path) -> Path:
    """Return the file that is written, behind symbolic links, or raise UsageError."""
    if page == Path():
        raise click.UsageError("--html is empty. Give the name of a file.")
    found = page.resolve()
    if not found.parent.is_dir():
        raise click.UsageError(f"--html {page}: the folder {found.parent} does not exist. Create it.")
    if found.exists() and not found.is_file():
        raise click.UsageError(f"--html {page}: is there, and is no regular file. Give another name.")
    return found


def _write(page: Path, text: str) -> None:
    """Write the file by one rename. It keeps the mode of one that is there."""
    temporary = page.with_name(f".{secrets.token_hex(8)}")
    try:
        temporary.write_text(text, encoding="utf-8")
        if page.exists():
            temporary.chmod(page.stat().st_mode & 0o7777)
        temporary.replace(page)
    finally:
        temporary.unlink(missing_ok=True)
