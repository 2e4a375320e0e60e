"""`tpuembed bench`: requests per second and latency of a server, by the number of connections."""

import dataclasses
import json
import shlex
import signal
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from tpuembed.cpus import available_cpus
from tpuembed.errors import ConfigError, ServingError, printable, reason
from tpuembed_cli.command import Command
from tpuembed_cli.output import print_json, table_of, to_terminal
from tpuembed_cli.quiet import import_tensorflow

if TYPE_CHECKING:
    from tpuembed_cli.load.requests import Requests
    from tpuembed_cli.load.running import Figures, LoadTarget

__all__ = ["bench"]

_BATCH_ROWS: Final = (512, 128, 2048)
"""The default of `serve`, and what is tried beside it."""
_EQUAL: Final = 0.9
"""Rates that are closer than this are equal. Of equal settings the simpler one is better."""
_FULL: Final = 0.8
"""A client that uses more of its processor than this is the limit, or may be."""
_WAITED_FOR: Final = 0.1
"""So is one that uses more than this where more connections give a higher rate."""
_NOT_OF_URLS: Final = ("workers", "max_batch_rows", "grpc")
_NOT_OF_FOLDERS: Final = ("model", "api_key_file", "tls_ca")
_SECONDS: Final = 10


class _NumberList(click.ParamType[tuple[int, ...]]):
    """Numbers of 1 or more with commas between, each once."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the numbers; see click."""
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.strip().isascii() and part.strip().isdigit() and int(part) for part in parts):
            self.fail(f"{value!r} is not a list such as 1,8,64. Give numbers of 1 or more.", param, ctx)
        return tuple(dict.fromkeys(map(int, parts)))


@dataclasses.dataclass(frozen=True)
class _Row:
    """A line of the table. `workers` and `batch_rows` are None for a server that is not ours."""

    workers: int | None
    batch_rows: int | None
    concurrency: int
    figures: "Figures"

    def limit(self, rows: "Sequence[_Row]") -> str:
        """Return what keeps the rate from being higher, given the rows of all settings."""
        found = self.figures
        same = [row for row in rows if (row.workers, row.batch_rows) == (self.workers, self.batch_rows)]
        grows = found.rate < _EQUAL * max(row.figures.rate for row in same)
        # While more connections give more, each request's time counts, and the client's work is a part of it.
        if found.client_cpu > (_WAITED_FOR if grows else _FULL):
            return "client-bound"
        if found.server_cpu is None or found.busiest is None:
            return "-"
        if found.client_cpu + found.server_cpu > 0.9 * available_cpus():
            return "processors"
        return "server process" if found.busiest > _FULL else "connections"


@click.command(
    cls=Command,
    short_help="Measure a server under load, and suggest its settings.",
    examples=(
        "tpuembed bench models/ranker",
        "tpuembed bench models/ranker --workers 1,2,4 --concurrency 64 --json",
        "tpuembed bench http://127.0.0.1:8501/v1/models/ranker --requests requests.tfrecord",
        "tpuembed bench grpc://127.0.0.1:8500 --model ranker --requests requests.tfrecord",
    ),
)
@click.argument("target", metavar="URL|MODEL_DIR")
@click.option(
    "--concurrency",
    type=_NumberList(),
    default="1,8,64",
    show_default=True,
    help="Numbers of connections to try. Each connection waits for its answer.",
)
@click.option(
    "--duration",
    type=click.IntRange(1, 600),
    default=2,
    show_default=True,
    help="Seconds of one measurement, after warm-up.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    help="Number of measurements. Their medians are shown.",
)
@click.option(
    "--requests",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="PredictionLog records, or one request in JSON. Default: the warm-up records of MODEL_DIR, else the server's example.",
)
@click.option(
    "--workers",
    type=_NumberList(),
    help="For MODEL_DIR: numbers of workers to try. Default: 1, 2, 4, ... up to the processors.",
)
@click.option(
    "--max-batch-rows",
    type=_NumberList(),
    help="For MODEL_DIR: batch sizes to try. Default: 512, then 128 and 2048 with the best workers.",
)
@click.option("--grpc", is_flag=True, help="For MODEL_DIR: measure gRPC instead of REST.")
@click.option(
    "--model", metavar="NAME", help="The model at URL. Default: the model in its path, or the only model of the server."
)
@click.option(
    "--api-key-file", type=click.Path(path_type=Path), metavar="FILE", help="Send the first key of this file to URL."
)
@click.option(
    "--tls-ca",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Certificates to trust at an https URL.",
)
@click.option(
    "--client",
    type=click.Choice(("auto", "own", "wrk", "h2load")),
    default="auto",
    show_default=True,
    help="auto: wrk for REST and h2load for gRPC where they are on PATH.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def bench(target: str, as_json: bool, **options: Any) -> None:
    """Measure requests per second and latency of predict, by the number of connections.

    For MODEL_DIR, this starts servers with several settings on this machine, one after the other, and suggests the best
    setting. A running server is measured as it is.
    """
    is_url = "://" in target
    for name in _NOT_OF_URLS if is_url else _NOT_OF_FOLDERS:
        if options[name]:
            flag = f"--{name.replace('_', '-')}"
            why = "a server that runs has its own settings" if is_url else "this command starts its server"
            raise click.UsageError(f"{flag} has no meaning for {target}: {why}. Leave it out.")
    import_tensorflow(verbose=False)
    signal.signal(signal.SIGTERM, _end)  # so that our servers are stopped
    rows, origin, client = (_of_url if is_url else _of_folder)(target, say=_say, **options)
    best = None if is_url else _best(rows)
    if as_json:
        print_json(_as_dict(target, client, origin, rows, best))
    else:
        _print(target, client, origin, rows, best)


def _end(*_: Any) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


def _say(text: str) -> None:
    click.echo(printable(text), err=True)


_Found = tuple[list[_Row], "Requests", str]


def _of_folder(target: str, *, say: Callable[[str], None], **options: Any) -> _Found:
    from tpuembed_cli.load.requests import read_requests
    from tpuembed_cli.load.server import served
    from tpuembed_serving.models.versions import find_versions
    from tpuembed_serving.models.warmup import WARMUP_PATH

    folder = Path(target)
    versions = find_versions(folder) if folder.is_dir() else {}
    if not versions:
        raise ConfigError(
            f"MODEL_DIR {target}: has no version, which is a folder whose name is a number. Export a model to it."
        )
    name, grpc = folder.absolute().name, options["grpc"]
    recorded = versions[max(versions)] / WARMUP_PATH
    file = options["file"] or (recorded if recorded.is_file() else None)
    if file is None and grpc:
        raise ConfigError(
            f"MODEL_DIR {target}: has no recorded requests, which gRPC needs. Give a file of records with --requests."
        )
    requests = None if file is None else read_requests(file, name, grpc=grpc)
    rows: list[_Row] = []
    client = ""

    def measure(workers: int, batch_rows: int, concurrencies: Sequence[int]) -> None:
        nonlocal requests, client
        with served(folder, name, workers, batch_rows, grpc=grpc) as server:
            requests = requests or _example(server)
            if not client:
                client, requests = _prepare(options["client"], server, requests, say)
            for concurrency, figures in _measured(client, server, requests, concurrencies, options):
                rows.append(_Row(workers, batch_rows, concurrency, figures))
                say(_line(rows[-1]))

    cpus = available_cpus()
    first, *others = options["max_batch_rows"] or _BATCH_ROWS
    for workers in options["workers"] or [2**power for power in range(cpus.bit_length()) if 2**power <= cpus]:
        measure(workers, first, options["concurrency"])
    best = _best(rows)
    for batch_rows in others:
        measure(best.workers or 1, batch_rows, [best.concurrency])
    assert requests is not None
    return rows, requests, client


def _of_url(target: str, *, say: Callable[[str], None], **options: Any) -> _Found:
    from tpuembed_cli.load.requests import read_requests
    from tpuembed_cli.load.running import LoadTarget
    from tpuembed_serving.core.api_keys import read_keys

    ports = {"http": 80, "https": 443, "grpc": 8500}
    try:
        parts = urllib.parse.urlsplit(target)
        port = parts.port or ports[parts.scheme]
    except (KeyError, ValueError):
        raise ConfigError(
            f"URL {target}: is no address of a server. Write http://HOST:PORT, https:// or grpc://."
        ) from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"URL {parts.scheme}://{parts.netloc.rpartition('@')[2]}: was given with a user, a query or a fragment, which no "
            "request has. Leave it out; a key is sent with --api-key-file."
        )
    _check_authorities(target, options["tls_ca"], is_tls=parts.scheme == "https")
    key_file = options["api_key_file"]
    path = parts.path.removeprefix("/v1/models/").strip("/")
    if not parts.hostname or "/" in path or (path and not parts.path.startswith("/v1/models/")):
        raise ConfigError(f"URL {target}: names no server or model. Write http://HOST:PORT/v1/models/NAME.")
    server = LoadTarget(
        host=parts.hostname,
        port=port,
        model=options["model"] or urllib.parse.unquote(path),
        grpc=parts.scheme == "grpc",
        tls=parts.scheme == "https",
        tls_ca=options["tls_ca"],
        api_key=None if key_file is None else read_keys(key_file)[0].key,
    )
    if server.host not in ("127.0.0.1", "::1", "localhost"):
        say(f"loading {server.host}, which is another machine, with up to {max(options['concurrency'])} connections")
    if server.grpc and not (server.model and options["file"]):
        raise ConfigError(
            f"URL {target}: a load over gRPC needs the model's name and recorded requests. Give --model and --requests."
        )
    if not server.model:
        server = dataclasses.replace(server, model=_only_model(server))
    file = options["file"]
    requests = _example(server) if file is None else read_requests(file, server.model, grpc=server.grpc)
    client, requests = _prepare(options["client"], server, requests, say)
    rows = []
    for concurrency, figures in _measured(client, server, requests, options["concurrency"], options):
        rows.append(_Row(None, None, concurrency, figures))
        say(_line(rows[-1]))
    return rows, requests, client


def _check_authorities(target: str, file: str | None, *, is_tls: bool) -> None:
    import ssl

    if file is not None and not is_tls:
        raise click.UsageError(f"--tls-ca has no meaning for {target}: it is no https URL. Leave it out.")
    try:
        ssl.create_default_context(cafile=file)
    except OSError as error:
        why = "has no certificate" if isinstance(error, ssl.SSLError) else reason(error)
        raise ConfigError(f"--tls-ca {file}: {why}. Give certificates in PEM format.") from None


def _prepare(
    wanted: str, server: "LoadTarget", requests: "Requests", say: Callable[[str], None]
) -> tuple[str, "Requests"]:
    """Return the client to use, and the requests that it can send, after a request has been answered."""
    from tpuembed_cli.load.running import choose_client, run_load

    client = choose_client(wanted, server)
    run_load("own", server, requests.bodies, 1, 1)
    requests = requests.first() if client == "h2load" and len(requests.bodies) > 1 else requests
    say(f"requests: {requests.origin}; client: {client}")
    return client, requests


def _measured(
    client: str, server: "LoadTarget", requests: "Requests", concurrencies: Sequence[int], options: Any
) -> Iterator[tuple[int, "Figures"]]:
    """Yield medians by concurrency, whose measurements take turns."""
    from tpuembed_cli.load.running import Figures, run_load

    rounds = [
        {count: run_load(client, server, requests.bodies, count, options["duration"]) for count in concurrencies}
        for _ in range(options["rounds"])
    ]
    for count in concurrencies:
        yield count, Figures.median([one[count] for one in rounds])


def _example(server: "LoadTarget") -> "Requests":
    """Return the example of the server's OpenAPI document: tpuembed makes one from the signature of each model."""
    from tpuembed_cli.load.requests import Requests

    document = _get(server, "/openapi.json")
    try:
        operation = document["paths"]["/v1/models/{model}:predict"]["post"]
        body = operation["requestBody"]["content"]["application/json"]["examples"][server.model]["value"]
    except (KeyError, TypeError):
        raise ConfigError(
            f"model {server.model}: the server has no example of its requests. Check the name, or give a request by --requests."
        ) from None
    return Requests.of_json(json.dumps(body).encode(), "the server's example request")


def _only_model(server: "LoadTarget") -> str:
    try:
        names = [str(model["name"]) for model in _get(server, "/models")["models"]]
    except (KeyError, TypeError):
        names = []
    if len(names) != 1:
        raise ConfigError(
            f"server {server.address}: has the models {', '.join(names) or 'of no list'}. Choose one with --model."
        )
    return names[0]


def _get(server: "LoadTarget", path: str) -> Any:
    import ssl

    url = f"http{'s' * server.tls}://{server.address}{path}"
    tls = ssl.create_default_context(cafile=server.tls_ca) if server.tls else None
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=server.headers), timeout=_SECONDS, context=tls
        ) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        error.close()
        raise ServingError(
            f"{url}: answers {error.code}. Check the server, its key, or give a request with --requests."
        ) from None
    except (OSError, ValueError) as error:
        raise ServingError(f"{url}: {getattr(error, 'reason', None) or error}. Check that the server runs.") from None


def _best(rows: Sequence[_Row]) -> _Row:
    """Return the simplest setting of those whose rate is the highest, or nearly so."""
    enough = _EQUAL * max(row.figures.rate for row in rows)
    good = [row for row in rows if row.figures.rate >= enough]
    return min(good, key=lambda row: (row.workers or 0, row.batch_rows != _BATCH_ROWS[0], row.concurrency))


def _line(row: _Row) -> str:
    setting = "" if row.workers is None else f"workers {row.workers}, batch rows {row.batch_rows}, "
    rate, p50, p99 = row.figures.rate, row.figures.p50_ms, row.figures.p99_ms
    return f"{setting}{row.concurrency} connections: {rate:,.0f} requests/s, p50 {p50:.2f} ms, p99 {p99:.2f} ms"


def _as_dict(target: str, client: str, requests: "Requests", rows: Sequence[_Row], best: _Row | None) -> dict[str, Any]:
    return {
        "target": target,
        "client": client,
        "requests": requests.origin,
        "rows_per_request": requests.mean_rows,
        "measurements": [
            {
                "workers": row.workers,
                "max_batch_rows": row.batch_rows,
                "concurrency": row.concurrency,
                "requests_per_second": row.figures.rate,
                "rows_per_second": row.figures.rate * requests.mean_rows,
                "p50_ms": row.figures.p50_ms,
                "p99_ms": row.figures.p99_ms,
                "client_processors": row.figures.client_cpu,
                "server_processors": row.figures.server_cpu,
                "limit": row.limit(rows),
            }
            for row in rows
        ],
        "best": None if best is None else {"workers": best.workers, "max_batch_rows": best.batch_rows},
    }


def _print(target: str, client: str, requests: "Requests", rows: Sequence[_Row], best: _Row | None) -> None:
    shown = []
    for row in rows:
        setting = {} if best is None else {"workers": row.workers, "batch rows": row.batch_rows}
        figures = row.figures
        shown.append(
            {
                **setting,
                "conns": row.concurrency,
                "requests/s": f"{figures.rate:,.0f}",
                "rows/s": f"{figures.rate * requests.mean_rows:,.0f}",
                "p50 ms": f"{figures.p50_ms:.2f}",
                "p99 ms": f"{figures.p99_ms:.2f}",
                "client": f"{figures.client_cpu:.0%}",
                "server": "-" if figures.server_cpu is None else f"{figures.server_cpu:.0%}",
                "limit": row.limit(rows),
            }
        )
    to_terminal(
        printable(f"{target}: {requests.origin} of {requests.mean_rows:.4g} rows, client {client}"),
        table_of("load", shown),
    )
    if best is not None:
        options = f"--workers {best.workers} --max-batch-rows {best.batch_rows}"
        click.echo(printable(f"best: tpuembed serve {shlex.quote(target)} {options}"))
