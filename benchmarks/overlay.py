"""Lookups through an overlay beside those of a plain version of the same table, and how long each takes to load.

    python -m benchmarks.overlay [--rounds N] [--threads N] [--rows N] [--folder DIR]

One table of width 64, exported as a plain version, and overlays of it with 1% and 10% of the rows changed. Lookups are calls of the
C API, as TensorFlow Serving makes them: all versions in one process, in turns. The ids are random, so an overlay of 10% has a
tenth of them. Changed rows differ in their last bits only, so that the contenders' numbers can be compared too.

Every load is a process of its own, from the call that loads to the first answer, in turns. The files are in the page cache. The
ratios of loads are medians of the rounds' own. Everything it makes is deleted.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.c_api import Contender, Shape
from benchmarks.load import LAYOUTS, LOADERS, seconds_to_answer
from benchmarks.lookups import TOLERANCE, contenders_of, microseconds

DIM = 64
OVERLAYS = {"overlay of 1%": 0.01, "overlay of 10%": 0.1}
PLAIN = "plain"
IDS = {26: 400, 6_656: 100}
"""Ids of a request -> calls in a round."""
REQUESTS = 8


def run(rounds: int = 9, threads: int = 1, rows: int = 2_600_000, folder: str | None = None) -> dict[str, Any]:
    """Measure lookups and loads.

    Returns:
        By number of ids: microseconds by contender, and the ratios to the plain version. By layout and loader: seconds to the first
        answer, and the ratio to the base.
    """
    found: dict[str, Any] = {"rows": rows, "dim": DIM, "rounds": rounds, "threads": threads}
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-", dir=folder) as made:
        code = f"from benchmarks.overlay import write_versions; write_versions({made!r}, {rows})"
        command = [sys.executable, "-c", code]
        package = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]
        contenders = [Contender(**fields) for fields in json.loads(Path(made, "contenders.json").read_text())]
        names = [contender.name for contender in contenders]
        random = np.random.default_rng(0)
        shapes = []
        for ids, calls in IDS.items():
            feeds = [{"x": random.integers(0, rows, ids)} for _ in range(REQUESTS)]
            of_all = dict.fromkeys(names, feeds)
            shapes.append(Shape(name=f"{ids} ids", batch=ids, rounds=rounds * calls, feeds=of_all))
        for name, one in microseconds(package, threads, False, contenders, shapes).items():
            assert one["difference"] < TOLERANCE, one
            us = one["microseconds"]
            found[name] = {
                "us": {contender: round(value, 1) for contender, value in us.items()},
                **{f"{overlay} / {PLAIN}": round(us[overlay] / us[PLAIN], 2) for overlay in OVERLAYS},
                **{
                    f"native, {overlay} / {PLAIN}": round(us[f"native, {overlay}"] / us[f"native, {PLAIN}"], 2)
                    for overlay in OVERLAYS
                },
            }
        for layout in LAYOUTS:
            for loader in LOADERS:
                found[f"load, {layout}, {loader}"] = _loads(Path(made, layout), loader, rounds)
    return found


def _loads(model_dir: Path, loader: str, rounds: int) -> dict[str, Any]:
    versions = {name: model_dir / str(number) for number, name in enumerate((PLAIN, *OVERLAYS), start=1)}
    taken: dict[str, list[float]] = {name: [] for name in versions}
    for turn in range(rounds + 1):
        for name in sorted(versions, reverse=turn % 2 == 1):
            seconds = seconds_to_answer(loader, versions[name])
            if turn:  # the first round warms up
                taken[name].append(seconds)
    return {
        "seconds": {name: round(statistics.median(each), 4) for name, each in taken.items()},
        **{
            f"{name} / {PLAIN}": round(
                statistics.median(ours / base for ours, base in zip(taken[name], taken[PLAIN], strict=True)), 2
            )
            for name in OVERLAYS
        },
    }


def write_versions(made: str, rows: int) -> None:
    """Write a MODEL_DIR for each layout and `contenders.json` into the folder `made`, and print where TensorFlow is installed."""
    import tensorflow as tf

    from tpuembed import export_saved_model

    place, random = Path(made), np.random.default_rng(0)
    values = random.standard_normal((rows, DIM), np.float32) * np.float32(0.05)
    table = tf.Variable(values)
    checkpoint = tf.train.Checkpoint(table=table)
    config = {"features": {"x": {"table": "table", "input": "id"}}}
    contenders = []
    for number, (name, share) in enumerate({PLAIN: 0.0, **OVERLAYS}.items(), start=1):
        if share:
            changed = random.choice(rows, int(rows * share), replace=False)
            values[changed] = np.nextafter(values[changed], np.float32(1))
            table.assign(values)
        prefix = checkpoint.write(str(place / "ckpt"))
        for layout in LAYOUTS:
            over: dict[str, Any] = {"base": 1} if share else {}
            report = export_saved_model(prefix, place / layout, serving_config=config, layout=layout, **over)
            assert report.version == number, report
            if layout == "mmap":
                contenders += contenders_of(report.path, {"serving_default": name})
                native = {"name": f"native, {name}", "version": str(report.path), "how": "native"}
                contenders.append({**native, "inputs": {}, "outputs": {}})
    (place / "contenders.json").write_text(json.dumps(contenders))
    print(Path(tf.__file__).parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="of TensorFlow, for a model; 0 is the caller's")
    parser.add_argument("--rows", type=int, default=2_600_000)
    parser.add_argument("--folder", help="where to write the models")
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
