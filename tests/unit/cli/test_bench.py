"""`tpuembed bench`: the arithmetic of its figures, what limits a rate, the best setting, and what it refuses."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.support.messages import said
from tpuembed_cli import bench
from tpuembed_cli.load.requests import Requests
from tpuembed_cli.load.running import Figures, percentiles
from tpuembed_cli.main import cli


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentiles_are_those_of_numpy(values: list[float]) -> None:
    expected = np.percentile(values, [50, 99], method="inverted_cdf")
    assert percentiles(values) == tuple(expected)


def test_medians_of_rounds() -> None:
    rounds = [Figures(10, 1, 5, 0.5), Figures(30, 3, 1, 0.1), Figures(20, 2, 9, 0.2)]
    assert Figures.median(rounds) == Figures(20, 2, 5, 0.2, None, None)


def row(
    rate: float,
    workers: int = 1,
    batch_rows: int = 512,
    concurrency: int = 8,
    client: float = 0.1,
    server: float | None = 0.5,
    busiest: float = 0.5,
) -> bench._Row:
    figures = Figures(rate, 1.0, 2.0, client, server, None if server is None else busiest)
    return bench._Row(workers, batch_rows, concurrency, figures)


@pytest.mark.parametrize(
    ("found", "limit"),
    [
        (row(1, client=0.81), "client-bound"),
        (row(1, client=0.81, server=1.5), "client-bound"),
        (row(1, client=0.3, server=1.6), "processors"),
        (row(1, client=0.3, server=1.0, busiest=0.9), "server process"),
        (row(1, client=0.1, server=1.0, busiest=0.9), "server process"),
        (row(1), "connections"),
        (row(1, server=None), "-"),
    ],
)
def test_what_limits_a_rate(found: bench._Row, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "available_cpus", lambda: 2)
    assert found.limit([found]) == limit
    more = row(2, concurrency=64)
    assert found.limit([found, more]) == ("client-bound" if found.figures.client_cpu > 0.1 else limit)
    assert found.limit([found, row(9, workers=2), row(1.1, concurrency=64)]) == limit


def test_the_simplest_of_equal_settings_is_the_best() -> None:
    rows = [row(50), row(96, batch_rows=2048), row(97), row(100, workers=2), row(98, concurrency=64)]
    assert bench._best(rows) is rows[2]
    assert bench._best([*rows, row(200, workers=2, batch_rows=128)]).workers == 2


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        ({"instances": [1, 2, 3]}, 3),
        ({"inputs": {"a": [[1], [2]], "b": [3, 4]}}, 2),
        ({"inputs": [1, 2, 3, 4]}, 4),
        ({"signature_name": "x", "inputs": {"a": 3}}, 1),
    ],
)
def test_rows_of_a_body(body: object, rows: int) -> None:
    requests = Requests.of_json(json.dumps(body).encode(), "it")
    assert requests.rows == (rows,)
    assert math.isclose(requests.mean_rows, rows)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nowhere"], 1),
        (["empty"], 1),
        (["rec", "--grpc"], 1),
        (["rec", "--requests", "nowhere"], 1),
        (["rec", "--requests", "text"], 1),
        (["rec", "--requests", "other.json"], 1),
        (["rec", "--model", "m"], 2),
        (["rec", "--concurrency", "1,0"], 2),
        (["rec", "--concurrency", "1,,2"], 2),
        (["rec", "--concurrency", "x"], 2),
        (["rec", "--duration", "0"], 2),
        (["http://127.0.0.1:1", "--workers", "2"], 2),
        (["http://127.0.0.1:1", "--grpc"], 2),
        (["http://127.0.0.1:1"], 1),
        (["http://127.0.0.1:1/v2/models/m"], 1),
        (["ftp://127.0.0.1"], 1),
        (["grpc://127.0.0.1:1"], 1),
        (["http://[::1"], 1),
        (["http://user:password@127.0.0.1:1"], 1),
        (["http://127.0.0.1:1?model=m"], 1),
        (["https://127.0.0.1:1", "--tls-ca", "text"], 1),
        (["http://127.0.0.1:1", "--tls-ca", "text"], 2),
        (["http://127.0.0.1:1/v1/models/m", "--requests", "one.json", "--client", "h2load"], 1),
        (["http://127.0.0.1:1/v1/models/m", "--requests", "one.json", "--client", "own"], 1),
        (["http://127.0.0.1:1/v1/models/m", "--requests", "one.json", "--api-key-file", "nowhere"], 1),
    ],
)
def test_refusals(arguments: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "rec" / "1").mkdir(parents=True)
    (tmp_path / "text").write_text("no records, and more bytes than a header has")
    (tmp_path / "other.json").write_text('{"examples": []}')
    (tmp_path / "one.json").write_text('{"instances": [1]}')
    found = CliRunner().invoke(cli, ["bench", *arguments])
    assert found.exit_code == code, found.output
    assert "password" not in found.output
    said(found.output)
