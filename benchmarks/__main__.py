"""`python -m benchmarks`: every benchmark in a process of its own; JSON, one table and a chart each, in results/."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
RUNS = {
    "train_step": "train_step.run()",
    "tracking": "tracking.run()",
    "names": "names.run()",
    "export": "export.run()",
    "load": "load.run()",
    "lookups": "lookups.run()",
    "lookups_2": "lookups.run(threads=2)",
    "native_models": "native_models.run()",
    "cold_rows": "cold_rows.run()",
    "overlay": "overlay.run()",
    "serve": "serve.run()",
    "serve_2": "serve.run(workers=2)",
    "serve_grpc": "serve.run(only=('echo', *serve.GRPC_PEERS))",
    "serve_plain": "serve.run_plain()",
    "read_checkpoint": "read_checkpoint.run()",
    "stats": "stats.run()",
    "vocabularies": "vocabularies.run()",
    "retrieval": "retrieval.run()",
    "redis": "redis.run()",
}


def main() -> None:
    """Run what the command line names, or all."""
    RESULTS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or RUNS:
        call = RUNS[name]
        code = f"import json; from benchmarks import {call.partition('.')[0]}; print(json.dumps({call}))"
        done = subprocess.run([sys.executable, "-c", code], cwd=HERE.parent, stdout=subprocess.PIPE, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        values = dict(_flat(found))
        _print(name, values)
        _draw(name, values)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _flat(child, f"{path}: {key}" if path else str(key))
    elif isinstance(value, int | float):
        yield path, float(value)


def _print(name: str, values: dict[str, float]) -> None:
    table = Table(title=name, title_justify="left", show_header=False)
    for key, value in values.items():
        table.add_row(key, f"{value:,.4g}")
    Console().print(table)


def _draw(name: str, values: dict[str, float]) -> None:
    """The ratios as bars: what a benchmark claims is a ratio."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    ratios = {key: value for key, value in values.items() if "/" in key or "over" in key or "ratio" in key}
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(ratios) + 1.2))
    axes.barh(list(ratios), list(ratios.values()))
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_title(f"{name}: ratios")
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=120)


if __name__ == "__main__":
    main()
