"""`tpuembed serve`: a SavedModel folder over TensorFlow Serving's REST and gRPC APIs."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tpuembed.errors import MissingExtraError

__all__ = ["serve"]

_PACKAGES = ("tensorflow", "fastapi", "uvicorn", "orjson")
_GRPC_PACKAGES = ("grpc", "grpc_health", "grpc_reflection", "tensorflow_serving")
_GRPC_PORT = 8500
_POSITIVE = click.IntRange(min=1)
_POSITIVE_FLOAT = click.FloatRange(min=0, min_open=True)


@click.command(short_help="Serve the models under MODEL_DIR over HTTP.")
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.option("--name", help="What URLs call the model; the default is the folder's name.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--rest-port", type=click.IntRange(0, 65535), default=8501, show_default=True, help="0 picks a free one.")
@click.option(
    "--grpc-port", type=click.IntRange(0, 65535), help=f"0 picks a free one.  [default: {_GRPC_PORT}, if it is free]"
)
@click.option("--no-grpc", is_flag=True, help="Serve the REST API alone.")
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
    no_grpc: bool,
    config: Path | None,
    workers: int,
    run_threads: int | None,
    **options: Any,
) -> None:
    """Serve MODEL_DIR/<version>/ over TensorFlow Serving's REST and gRPC APIs.

    The newest version is loaded, and a newer one takes over without a gap once it appears. The ports listen at once;
    GET /readyz is 200 when the model is loaded. SIGTERM finishes the requests in progress and exits 0.
    """
    _refuse_unbuilt(config, workers)
    options |= _grpc_options(grpc_port, no_grpc)
    _check_extra(() if no_grpc else _GRPC_PACKAGES)
    from tpuembed_serving import ServerSettings
    from tpuembed_serving import serve as run_server

    if run_threads is not None:
        options["run_threads"] = run_threads
    run_server(ServerSettings.for_model_dir(model_dir, **options))


def _grpc_options(port: int | None, off: bool) -> dict[str, Any]:
    """The default port is tried; a server that only REST clients know need not have it."""
    if off and port is not None:
        raise click.UsageError("--grpc-port and --no-grpc contradict each other; leave one out")
    if off:
        return {"grpc_port": None}
    return {"grpc_port": _GRPC_PORT if port is None else port, "grpc_optional": port is None}


def _refuse_unbuilt(config: Path | None, workers: int) -> None:
    asked = {"--config": config is not None, "--workers above 1": workers > 1}
    for option, is_asked in asked.items():
        if is_asked:
            raise click.UsageError(f"{option} is not built yet; leave it out")


def _check_extra(more: Sequence[str]) -> None:
    for package in (*_PACKAGES, *more):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("tpuembed serve", package, "serve")
