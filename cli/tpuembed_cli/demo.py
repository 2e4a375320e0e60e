"""`tpuembed demo`: train, export, serve and predict, with the results on one screen."""

import csv
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tpuembed_cli.command import Command
from tpuembed_cli.options import verbosity_options
from tpuembed_cli.quiet import import_tensorflow, stdout_on_stderr

if TYPE_CHECKING:
    from tpuembed_cli.ratings.pipeline import DemoResult

__all__ = ["demo"]


@click.command(
    cls=Command,
    short_help="Train on ratings, export, serve and predict.",
    examples=(
        "tpuembed demo",
        "tpuembed demo --ratings ml-100k/u.data --out demo --epochs 10",
    ),
)
@click.option(
    "--ratings", type=click.Path(path_type=Path), metavar="FILE", help="MovieLens u.data (user, item, rating by tabs)."
)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Keep checkpoint, export and predictions here."
)
@click.option(
    "--epochs", type=click.IntRange(min=1), default=5, show_default=True, help="How often to go over the ratings."
)
@verbosity_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def demo(
    ratings: Path | None,
    out: Path | None,
    epochs: int,
    verbose: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Train on ratings, checkpoint, export, serve, and predict over HTTP.

    Without --ratings a set of MovieLens 100K's shape is generated. Ratings are trained on as (rating - 1) / 4; RMSE and the
    predictions' CSV are in that unit.
    """
    from tpuembed_cli.ratings import data

    loaded = data.generate() if ratings is None else data.load(ratings)

    def say(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    say("loading TensorFlow")
    import_tensorflow(verbose=verbose)
    from tpuembed_cli.ratings.pipeline import run_demo

    out = Path(tempfile.mkdtemp(prefix="tpuembed-demo-")) if out is None else out
    with stdout_on_stderr():
        result = run_demo(loaded, str(ratings or "generated"), out, epochs, say)
    if as_json:
        click.echo(json.dumps(result.to_dict()))
    elif not quiet:
        _print(_rows(result))
        click.echo(_now_try(result))


def _print(rows: Mapping[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="train => checkpoint => export => serve", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(soft_wrap=True).print(table)


def _rows(result: "DemoResult") -> dict[str, str]:
    return {
        "ratings": result.ratings,
        "train RMSE per epoch": " ".join(f"{rmse:.4f}" for rmse in result.train_rmse),
        "test RMSE": f"{result.test_rmse:.4f}",
        "export": f"{result.export_bytes / 1e6:.2f} MB of tables in {result.export_seconds:.1f} s",
        "peak memory": f"workers {result.worker_peak_rss_bytes / 1e6:.0f} MB, this process {result.peak_rss_bytes / 1e6:.0f} MB",
        "first prediction": f"{result.first_prediction:.6f} over HTTP, {result.first_prediction_in_training:.6f} in training",
        "largest difference": f"{result.largest_difference:.1e} over {result.compared} test predictions",
        "predict p50": f"{result.predict_p50_ms:.2f} ms, one row per request",
        "export path": result.export_path,
        "test predictions": result.test_predictions,
    }


def _now_try(result: "DemoResult") -> str:
    """Return the commands, for a shell, that serve the demo's model and repeat the first test prediction."""
    with open(result.test_predictions, newline="") as file:
        first = next(csv.DictReader(file))
    body = {"instances": [{"user_id": int(first["user"]), "movie_id": int(first["item"])}]}
    program = "tpuembed" if shutil.which("tpuembed") else shlex.quote(str(Path(sys.executable).with_name("tpuembed")))
    return f"""
Now try: serve the model, wait until the server is ready, predict, stop the server.

    {program} serve {shlex.quote(str(Path(result.export_path).parent))} &
    curl -sf --retry 300 --retry-delay 1 --retry-connrefused http://127.0.0.1:8501/readyz
    curl -d '{json.dumps(body)}' http://127.0.0.1:8501/v1/models/ratings:predict
    kill $!

The answer is the first prediction of the table, {result.first_prediction:.6f}."""
