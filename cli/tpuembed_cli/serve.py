"""`tpuembed serve`: a SavedModel folder over TensorFlow Serving's REST API."""

import importlib.util
from pathlib import Path
from typing import Any

import click

from tpuembed.errors import MissingExtraError

__all__ = ["serve"]

_PACKAGES = ("tensorflow", "fastapi", "uvicorn", "orjson")
_POSITIVE = click.IntRange(min=1)
_POSITIVE_FLOAT = click.FloatRange(min=0, min_open=True)


@click.command(short_help="Serve the models under MODEL_DIR over HTTP.")
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.option("--name", help="What URLs call the model; the default is the folder's name.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--rest-port", type=click.IntRange(0, 65535), default=8501, show_default=True, help="0 picks a free one.")
@click.option("--grpc-port", type=click.IntRange(0, 65535), help="Not built yet.  [contract default: 8500]")
@click.option("--config", type=click.Path(path_type=Path), help="A models.config of several models. Not built yet.")
@click.option(
    "--workers", type=_POSITIVE, default=1, show_default=True, help="Processes; more than 1 is not built yet."
)
@click.option(
    "--poll-seconds",
    type=_POSITIVE_FLOAT,
    default=1.0,
    show_default=True,
    help="Pause between looks for a new version.",
)
@click.option(
    "--rest-timeout-ms", type=_POSITIVE, default=30_000, show_default=True, help="After this a request is answered 504."
)
@click.option("--run-threads", type=_POSITIVE, help="Runs of the model at once.  [default: the number of CPUs]")
@click.option(
    "--max-queued-requests", type=_POSITIVE, default=1000, show_default=True, help="More waiting are answered 503."
)
@click.option("--max-body-bytes", type=_POSITIVE, help="Larger request bodies are answered 413.  [default: no limit]")
@click.option(
    "--drain-seconds", type=_POSITIVE_FLOAT, default=30.0, show_default=True, help="To finish requests after SIGTERM."
)
@click.option(
    "--prewarm", is_flag=True, help="Read mapped tables, and check their checksums, before a version is available."
)
@click.option(
    "--random-access", is_flag=True, help="Read one page, without readahead, where a mapped table is not in memory."
)
def serve(
    model_dir: Path,
    grpc_port: int | None,
    config: Path | None,
    workers: int,
    run_threads: int | None,
    **options: Any,
) -> None:
    """Serve MODEL_DIR/<version>/ over TensorFlow Serving's REST API.

    The newest version is loaded, and a newer one takes over without a gap once it appears. The port listens at once;
    GET /readyz is 200 when the model is loaded. SIGTERM finishes the requests in progress and exits 0.
    """
    _refuse_unbuilt(grpc_port, config, workers)
    _check_extra()
    from tpuembed_serving import ServerSettings
    from tpuembed_serving import serve as run_server

    if run_threads is not None:
        options["run_threads"] = run_threads
    run_server(ServerSettings.for_model_dir(model_dir, **options))


def _refuse_unbuilt(grpc_port: int | None, config: Path | None, workers: int) -> None:
    asked = {"--grpc-port": grpc_port is not None, "--config": config is not None, "--workers above 1": workers > 1}
    for option, is_asked in asked.items():
        if is_asked:
            raise click.UsageError(f"{option} is not built yet; leave it out")


def _check_extra() -> None:
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("tpuembed serve", package, "serve")
