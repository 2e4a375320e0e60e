"""Statistics as one page of HTML that needs no other file and no network."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from tpuembed.stats.table import BadRows, PathStats, StorageError, TableStats

__all__ = ["stats_page"]

_WIDTH: Final = 640
_HEIGHT: Final = 180
_STYLE: Final = """
:root { color-scheme: light dark; }
:root { --text: #1c2024; --quiet: #60646c; --line: #d9d9e0; --back: #fff; --bar: #3a6fd8; --bad: #c62a2f; }
@media (prefers-color-scheme: dark) {
  :root { --text: #edeef0; --quiet: #b0b4ba; --line: #363a3f; --bar: #70a0ff; --bad: #ff9592; --back: #111113; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2.5rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin-bottom: .3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .8rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
a { color: var(--bar); }
td.text { text-align: left; white-space: normal; }
th, .quiet { color: var(--quiet); font-weight: normal; } .bad { color: var(--bad); }
svg { max-width: 100%; height: auto; } svg text { fill: var(--quiet); font-size: 12px; } rect.bar { fill: var(--bar); }
line { stroke: var(--line); }
"""


def stats_page(found: PathStats) -> str:
    """Return a page with a line for each table, and for each the histogram of its norms and the errors of storage types."""
    title = html.escape(found.path)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Statistics of {title}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>Statistics of {title}</h1>\n{_overview(found.tables)}\n"
        + "\n".join(_section(number, table) for number, table in enumerate(found.tables))
        + "\n</body></html>\n"
    )


def _overview(tables: Sequence[TableStats]) -> str:
    header = ("table", "rows", "width", "dtype", "with NaN", "with infinity", "of zeros", "untouched", "median norm")
    rows = [
        (
            f'<a href="#table-{number}">{html.escape(table.name)}</a>',
            f"{table.rows:,}",
            f"{table.dim:,}",
            html.escape(table.dtype),
            _marked(table.nan.count),
            _marked(table.infinite.count),
            f"{table.zero_rows:,}",
            "unknown" if table.untouched.count is None else f"{table.untouched.count:,}",
            "-" if table.norms is None else f"{table.norms.percentiles[50]:.4g}",
        )
        for number, table in enumerate(tables)
    ]
    return _table(header, rows)


def _section(number: int, table: TableStats) -> str:
    facts = [
        ("rows with NaN", _bad(table.nan)),
        ("rows with infinity", _bad(table.infinite)),
        ("rows of zeros", f"{table.zero_rows:,}"),
        (
            "untouched rows",
            html.escape(f"unknown: {table.untouched.reason}")
            if table.untouched.count is None
            else f"{table.untouched.count:,}",
        ),
        ("largest norms", ", ".join(f"row {one.row}: {one.norm:.4g}" for one in table.largest) or "-"),
    ]
    lines = "".join(f'<tr><td>{name}</td><td class="text">{value}</td></tr>' for name, value in facts)
    parts = [
        f'<h2 id="table-{number}">{html.escape(table.name)} '
        f'<span class="quiet">{table.rows:,} x {table.dim:,}, {html.escape(table.dtype)}</span></h2>',
        f"<table>{lines}</table>",
    ]
    if table.norms is not None:
        norms = table.norms
        figures = {"min": norms.min, **{f"p{p}": value for p, value in norms.percentiles.items()}, "max": norms.max}
        parts += [
            f"<h3>Norms of rows</h3>{_histogram(table)}",
            _table([*figures, "mean"], [[f"{value:.4g}" for value in (*figures.values(), norms.mean)]]),
        ]
    parts.append(f"<h3>Error of storage types</h3>{_storage(table.storage)}")
    return "\n".join(parts)


def _histogram(table: TableStats) -> str:
    """Return bars over a logarithmic axis of norms."""
    assert table.norms is not None
    bins = table.norms.histogram
    if not bins:
        return "<p>All rows are zero.</p>"
    low, high = math.log(bins[0].start), math.log(bins[-1].stop)
    most = max(one.rows for one in bins)
    bars = []
    for one in bins:
        left, right = ((math.log(edge) - low) / (high - low) * _WIDTH for edge in (one.start, one.stop))
        tall = one.rows / most * _HEIGHT
        about = f"{one.rows:,} rows of norm {one.start:.4g} to {one.stop:.4g}"
        bars.append(
            f'<rect class="bar" x="{left:.1f}" y="{_HEIGHT - tall:.1f}" width="{max(0.5, right - left - 1):.1f}" '
            f'height="{tall:.1f}"><title>{about}</title></rect>'
        )
    middle = math.exp((low + high) / 2)
    ticks = ((0, "start", bins[0].start), (_WIDTH / 2, "middle", middle), (_WIDTH, "end", bins[-1].stop))
    labels = "".join(
        f'<text x="{x:.0f}" y="{_HEIGHT + 18}" text-anchor="{anchor}">{value:.3g}</text>' for x, anchor, value in ticks
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 24}" width="{_WIDTH}" role="img" aria-label="Histogram of the norms of rows">'
        f'{"".join(bars)}<line x1="0" x2="{_WIDTH}" y1="{_HEIGHT}" y2="{_HEIGHT}"/>{labels}</svg>'
        f'<p class="quiet">Up to {most:,} rows a bar; the axis of norms is logarithmic.</p>'
    )


def _storage(storage: Mapping[str, StorageError]) -> str:
    rows = []
    for name, one in storage.items():
        if one.error is None:
            rows.append((html.escape(name), f'<span class="bad">{html.escape(one.reason)}</span>', "", ""))
        elif not one.error.sampled_rows:
            rows.append((html.escape(name), f"{one.error.max_abs:.3g}", "0", "1"))
        else:
            rows.append(
                (html.escape(name), f"{one.error.max_abs:.3g}", f"{one.error.rms:.3g}", f"{one.error.cosine:.6f}")
            )
    return _table(("stored as", "largest error", "RMS", "mean cosine"), rows)


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _marked(count: int) -> str:
    return f'<span class="bad">{count:,}</span>' if count else "0"


def _bad(rows: BadRows) -> str:
    if not rows.count:
        return "0"
    more = ", ..." if rows.count > len(rows.first) else ""
    return f'<span class="bad">{rows.count:,}</span> (row {", ".join(map(str, rows.first))}{more})'
