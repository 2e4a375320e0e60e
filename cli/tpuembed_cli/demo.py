"""`tpuembed demo`: train, export, serve and predict, with the results on one screen."""

import csv
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpuembed_cli.command import Command
from tpuembed_cli.options import verbosity_options
from tpuembed_cli.quiet import import_tensorflow, stdout_on_stderr

if TYPE_CHECKING:
    from tpuembed_cli.ratings.pipeline import DemoResult
    from tpuembed_cli.ratings.retrieval import RetrievalResult

__all__ = ["demo"]


@click.command(
    cls=Command,
    short_help="Train on ratings, export, serve and predict.",
    examples=(
        "tpuembed demo",
        "tpuembed demo --ratings ml-100k/u.data --out demo --epochs 10",
        "tpuembed demo --retrieval",
    ),
)
@click.option(
    "--ratings", type=click.Path(path_type=Path), metavar="FILE", help="MovieLens u.data (user, item, rating by tabs)."
)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Keep checkpoint, export and predictions here."
)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    help="How often to go over the ratings.  [default: 5, or 3 with --retrieval]",
)
@click.option("--retrieval", is_flag=True, help="Train two towers, and ask for the best movies of a user.")
@verbosity_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def demo(
    ratings: Path | None,
    out: Path | None,
    epochs: int | None,
    retrieval: bool,
    verbose: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Train on ratings, checkpoint, export, serve, and predict over HTTP.

    Without --ratings a set of MovieLens 100K's shape is generated. Ratings are trained on as (rating - 1) / 4; RMSE and the
    predictions' CSV are in that unit. With --retrieval each rating is a pair of a user and a movie, whatever its stars. In
    generated ratings the users choose movies by popularity alone, so there is little to learn for two towers: give --ratings.
    """
    from tpuembed_cli.ratings import data

    loaded = data.generate() if ratings is None else data.load(ratings)

    def say(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    say("loading TensorFlow")
    import_tensorflow(verbose=verbose)
    from tpuembed_cli.ratings.pipeline import run_demo
    from tpuembed_cli.ratings.retrieval import run_retrieval

    out = Path(tempfile.mkdtemp(prefix="tpuembed-demo-")) if out is None else out
    result: DemoResult | RetrievalResult
    with stdout_on_stderr():
        if retrieval:
            result = found = run_retrieval(loaded, str(ratings or "generated"), out, epochs or 3, say)
            title, rows, now_try = (
                "train => checkpoint => export an index => serve",
                _retrieval_rows(found),
                _now_ask(found),
            )
        else:
            result = rated = run_demo(loaded, str(ratings or "generated"), out, epochs or 5, say)
            title, rows, now_try = "train => checkpoint => export => serve", _rows(rated), _now_try(rated)
    if as_json:
        click.echo(json.dumps(result.to_dict()))
    elif not quiet:
        _print(title, rows)
        click.echo(now_try)


def _print(title: str, rows: Mapping[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False)
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


def _retrieval_rows(result: "RetrievalResult") -> dict[str, str]:
    def shown(accuracy: Mapping[int, float]) -> str:
        return "  ".join(f"top {k}: {share:.5f}" for k, share in accuracy.items())

    return {
        "ratings": result.ratings,
        "loss per epoch": " ".join(f"{loss:.0f}" for loss in result.loss),
        "accuracy of random movies": shown({k: min(1.0, k / result.movies) for k in result.accuracy}),
        "test accuracy in training": shown(result.accuracy),
        "test accuracy over HTTP": shown(result.served_accuracy),
        "same 100 movies": f"{result.same_answers} of {result.users} users",
        "export": f"{result.export_path} in {result.export_seconds:.1f} s",
        "predict p50": f"{result.predict_p50_ms:.2f} ms, one user per request",
        "new movies for one user": f"user {result.user}: {' '.join(map(str, result.top_ten))}",
    }


def _commands(export_path: str, body: Any, name: str) -> str:
    """Return the commands, for a shell, that serve a model of the demo and ask it once."""
    program = "tpuembed" if shutil.which("tpuembed") else shlex.quote(str(Path(sys.executable).with_name("tpuembed")))
    return f"""
Now try: serve the model, wait until the server is ready, predict, stop the server.

    {program} serve {shlex.quote(str(Path(export_path).parent))} &
    curl -sf --retry 300 --retry-delay 1 --retry-connrefused http://127.0.0.1:8501/readyz
    curl -d '{json.dumps(body)}' http://127.0.0.1:8501/v1/models/{name}:predict
    kill $!
"""


def _now_ask(result: "RetrievalResult") -> str:
    return _commands(result.export_path, {"instances": [{"user_id": result.user}]}, "top") + (
        "\nThe answer is the user's best 100 movies, with those that the user has rated."
    )


def _now_try(result: "DemoResult") -> str:
    """Return the commands, for a shell, that serve the demo's model and repeat the first test prediction."""
    with open(result.test_predictions, newline="") as file:
        first = next(csv.DictReader(file))
    body = {"instances": [{"user_id": int(first["user"]), "movie_id": int(first["item"])}]}
    return _commands(result.export_path, body, "ratings") + (
        f"\nThe answer is the first prediction of the table, {result.first_prediction:.6f}."
    )
