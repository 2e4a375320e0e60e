"""X-Model-Version and metrics as clients, Prometheus and Grafana see them, of whole servers."""

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.serving.half_plus_two import VERSION, save_graph
from tests.support.serving.models import save_scale
from tests.support.serving.process import ServerProcess, workers

DOCKER = Path(__file__).parents[2] / "docker"
PAGE = "/monitoring/prometheus/metrics"
HEADER = "x-model-version"
CONFIG = """
model_config_list {{ config {{ name: "m" base_path: "{path}" model_platform: "tensorflow"
  model_version_policy {{ all {{ }} }}
  version_labels {{ key: "stable" value: 1 }} version_labels {{ key: "canary" value: 2 }} }} }}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1 and 2 multiply, 3 also takes examples, and 4 is damaged."""
    folder = tmp_path_factory.mktemp("metrics")
    for version in (1, 2):
        save_scale(folder / "m" / str(version), float(version))
    save_graph(folder / "half", 2.0)
    shutil.move(folder / "half" / VERSION, folder / "m" / "3")
    (folder / "m" / "4").mkdir()
    (folder / "m" / "4" / "saved_model.pb").write_bytes(b"\xff")
    path = folder / "models.config"
    path.write_text(CONFIG.format(path=folder / "m"))
    return path


@pytest.fixture(
    scope="module",
    params=[("--workers", "2"), ("--enable-cors",), ("--access-log", "-")],
    ids=lambda options: options[0],
)
def server(request: pytest.FixtureRequest, config: Path) -> Iterator[ServerProcess]:
    log = config.with_name(f"{request.param[0]}.log")
    options = ("--config", str(config), "--metrics", *request.param)
    with ServerProcess(None, log, *options) as running:
        running.wait_for(3)
        running.wait_for(4, "END")
        yield running
    assert "Traceback" not in running.log


def url(server: ServerProcess, path: str) -> str:
    return f"http://{server.host}:{server.port}{path}"


INFER = '{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [2.0]}], "parameters": %s}'
EXAMPLES = '{"signature_name": "%s_x_to_y", "examples": [{"x": 2.0}]}'
ANSWERED = [
    ("/v1/models/m:predict", '{"instances": [1.0]}', "3"),
    ("/v1/models/m/labels/stable:predict", '{"instances": [1.0]}', "1"),
    ("/invocations", json.dumps({"instances": [1.0] * 80_000}), "3"),
    ("/v1/models/m:classify", EXAMPLES % "classify", "3"),
    ("/v1/models/m:regress", EXAMPLES % "regress", "3"),
    ("/v2/models/m/infer", INFER % "{}", "3"),
    ("/v2/models/m/versions/1/infer", INFER % '{"binary_data_output": true}', "1"),
]
FAILED = [
    ("/v1/models/none:predict", '{"instances": [1]}', 404),
    ("/v1/models/m/versions/9:predict", '{"instances": [1]}', 404),
    ("/v1/models/m/versions/4:predict", '{"instances": [1]}', 404),
    ("/v1/models/m/labels/none:predict", '{"instances": [1]}', 400),
    ("/v1/models/m:predict", "{", 400),
    ("/v2/models/none/infer", '{"inputs": []}', 404),
]


def test_an_answer_names_its_version_and_an_error_names_none(server: ServerProcess) -> None:
    for target, body, version in ANSWERED:
        reply = httpx.post(url(server, target), content=body, timeout=60)
        assert (reply.status_code, reply.headers[HEADER]) == (200, version), reply.text[:300]
        exposed = [name.lower() for name in reply.headers.get("access-control-expose-headers", "").split(", ")]
        assert (HEADER in exposed) == ("access-control-allow-origin" in reply.headers)
    for target, body, status in FAILED:
        reply = httpx.post(url(server, target), content=body)
        assert reply.status_code == status, reply.text
        assert HEADER not in reply.headers


Series = set[tuple[str, frozenset[tuple[str, str]]]]


@pytest.fixture
def scraped(server: ServerProcess) -> str:
    """What Prometheus reads after good and bad requests of many clients at once."""

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            bodies = ['{"instances": [1.0]}'] * 60 + ["{"]
            await asyncio.gather(*(client.post(url(server, "/v1/models/m:predict"), content=body) for body in bodies))

    asyncio.run(ask())
    return httpx.get(url(server, PAGE), timeout=60).text


def series(text: str) -> Series:
    """All names with their labels. The parser adds _total to counters."""
    found = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            bare = sample.name.removesuffix("_total")
            name = bare if f"# TYPE {bare} counter\n" in text else sample.name
            found.add((name, frozenset(sample.labels.items())))
    return found


def test_each_metric_has_its_help_once(scraped: str) -> None:
    families = list(text_string_to_metric_families(scraped))
    assert len(families) > 20
    for family in families:
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram")
    helped = re.findall(r"^# HELP (\S+) ", scraped, re.MULTILINE)
    assert len(helped) == len(set(helped)) == len(families)


def test_metrics_of_the_whole_server(server: ServerProcess, scraped: str) -> None:
    values = {
        (one.name, frozenset(one.labels.items())): one.value
        for family in text_string_to_metric_families(scraped)
        for one in family.samples
    }
    states = {
        (dict(labels)["version"], dict(labels)["state"]): value
        for (name, labels), value in values.items()
        if name == ":tpuembed:serving:version_state"
    }
    # Not a sum over the workers.
    assert states == {("1", "AVAILABLE"): 1, ("2", "AVAILABLE"): 1, ("3", "AVAILABLE"): 1, ("4", "END"): 1}
    assert values[":tpuembed:serving:available_versions", frozenset({("model_name", "m")})] == 3
    pids = [server.process.pid, *workers(server)] if "--workers" in server.log_path.name else [server.process.pid]
    resident = sum(
        int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) * 1024 for pid in pids
    )
    none = frozenset[tuple[str, str]]()
    assert values["process_resident_memory_bytes", none] == pytest.approx(resident, rel=0.1)
    assert values["process_cpu_seconds_total", none] > 0
    assert 0 < values[":tpuembed:serving:anonymous_memory_bytes", none] < values["process_resident_memory_bytes", none]


# ---- the dashboard and the alerts

OF_PROMETHEUS = {"up"}
"""Metrics that Prometheus makes itself."""
LABELS_OF_PROMETHEUS = {"job", "instance"}


def selectors(expression: str) -> list[tuple[str, Any, set[str]]]:
    """The metrics of an expression, their matchers, and the labels by which it groups, which all of them must have."""
    tree = promql_parser.parse(re.sub(r"\$__(rate_)?interval", "5m", expression))
    found: list[Any] = []
    groups: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            assert node.modifier.type == promql_parser.AggModifierType.By
            groups.update(node.modifier.labels)

    promql_parser.walk(tree, visit)
    assert found, expression
    return [(node.name, node.matchers.matchers, groups) for node in found]


def check(expression: str, known: Series) -> None:
    for name, matchers, groups in selectors(expression):
        if name in OF_PROMETHEUS:
            assert {one.name for one in matchers} | groups <= LABELS_OF_PROMETHEUS, expression
            continue
        of_name = [dict(labels) for metric, labels in known if metric == name]
        assert of_name, f"no metric {name}: {expression}"
        for labels in of_name:
            assert groups - LABELS_OF_PROMETHEUS <= set(labels), expression
        own = [one for one in matchers if one.name not in LABELS_OF_PROMETHEUS]
        assert {one.name for one in own} <= set(of_name[0]), expression
        exact = [one for one in own if one.op == promql_parser.MatchOp.Equal]
        assert any(all(labels[one.name] == one.value for one in exact) for labels in of_name), expression


def expressions() -> list[str]:
    board = json.loads((DOCKER / "grafana.json").read_text(encoding="utf-8"))
    rules = yaml.safe_load((DOCKER / "alerts.yaml").read_text(encoding="utf-8"))
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return shown + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def test_the_server_has_all_metrics_that_are_used(scraped: str) -> None:
    known = series(scraped)
    for expression in expressions():
        check(expression, known)
    board = json.loads((DOCKER / "grafana.json").read_text(encoding="utf-8"))
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            selected = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert selected is not None
            check(f"sum by ({selected[2]}) ({selected[1]})", known)
