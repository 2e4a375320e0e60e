"""The manifests of docker/k8s: against Kubernetes' schemas, and against the command that they run. No cluster applies them."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from click.testing import CliRunner

from tpuembed_cli.main import cli
from tpuembed_serving.telemetry.metrics import DEFAULT_PATH

FOLDER = Path(__file__).parents[2] / "docker" / "k8s"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
VERSIONS = ("1.30", "1.37")  # the first with preStop.sleep by default, and the newest that the validator has


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def schema(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


TEXT = {"type": "string"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
OWN = {
    # Restated from the definitions of the Prometheus operator (monitoring.coreos.com_servicemonitors, and
    # monitoring.coreos.com_prometheusrules, whose groups tests/e2e/test_serve_metrics.py checks) and of KServe
    # (serving.kserve.io_servingruntimes): of their fields those that are used here. A container is Kubernetes' own.
    "ServiceMonitor": schema(
        selector=schema(matchLabels=TEXTS),
        endpoints={
            "type": "array",
            "items": schema(port=TEXT, path=TEXT, interval={"type": "string", "pattern": r"^[0-9]+(ms|s|m|h)$"}),
        },
    ),
    "PrometheusRule": schema(groups={"type": "array", "minItems": 1}),
    "ServingRuntime": schema(
        annotations=TEXTS,
        supportedModelFormats={
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": TEXT,
                    "version": TEXT,
                    "autoSelect": {"type": "boolean"},
                    "priority": {"type": "integer", "minimum": 1},
                },
                "required": ["name"],
                "additionalProperties": False,
            },
        },
        protocolVersions={"type": "array", "items": {"enum": ["v1", "v2", "grpc-v1", "grpc-v2"]}},
        containers={"type": "array", "items": {"type": "object", "required": ["name", "image"]}},
    ),
}


def containers() -> list[Any]:
    pods = [documents("server.yaml")[0]["spec"]["template"]["spec"]]
    pods += [document["spec"] for document in documents("kserve-runtime.yaml")]
    return [container for pod in pods for container in pod["containers"]]


def options(container: Any) -> dict[str, str]:
    command = container["command"]
    return {word: value for word, value in zip(command, [*command[1:], ""], strict=True) if word.startswith("--")}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", FILES)
def test_a_cluster_takes_them(name: str, version: str) -> None:
    for document in documents(name):
        if own := OWN.get(document["kind"]):
            jsonschema.validate(document["spec"], own)
            pod = {"containers": document["spec"].get("containers", [{"name": "none"}])}
            document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}, "spec": pod}
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("change", [{"replica": 2}, {"selector": "ranker"}])
def test_the_validator_refuses_what_a_cluster_refuses(change: dict[str, Any]) -> None:
    deployment, _ = documents("server.yaml")
    deployment["spec"] |= change
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)


def test_every_file_is_named() -> None:
    text = (FOLDER / "kustomization.yaml").read_text()
    assert [name for name in FILES if f"- {name}" not in text] == []
    assert set(yaml.safe_load(text)["resources"]) <= set(FILES)


def test_the_rules_are_those_of_prometheus() -> None:
    alerts = (FOLDER.parent / "alerts.yaml").read_text()
    (rule,) = documents("prometheus-rule.yaml")
    service = next(one for one in documents("server.yaml") if one["kind"] == "Service")
    name = service["metadata"]["name"]  # the job of what a ServiceMonitor finds
    assert rule["spec"] == yaml.safe_load(alerts.replace('job="tpuembed"', f'job="{name}"'))
    assert alerts.count('job="tpuembed"') == alerts.count("job=")


@pytest.mark.parametrize("container", containers(), ids=lambda container: container["name"])
def test_the_command_has_the_options(container: Any) -> None:
    known = CliRunner().invoke(cli, ["serve", "--help"]).output.replace(",", " ").split()
    assert container["command"][:2] == ["tpuembed", "serve"]
    assert [option for option in options(container) if option not in known] == []
    given = options(container)
    ports = {str(port["containerPort"]) for port in container["ports"]}
    assert given["--rest-port"] in ports
    assert ports <= {given["--rest-port"], given["--grpc-port"]}
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in ("/readyz", "/healthz")


def test_a_pod_has_the_time_to_stop() -> None:
    deployment, _ = documents("server.yaml")
    pod = deployment["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    given = options(server)
    seconds = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    seconds += int(given["--lame-duck-seconds"]) + int(given["--drain-seconds"]) + 10
    assert pod["terminationGracePeriodSeconds"] == seconds


def test_names_labels_and_ports_agree() -> None:
    deployment, service = documents("server.yaml")
    scaler, budget = documents("scaling.yaml")
    (policy,), (monitor,) = documents("network-policy.yaml"), documents("service-monitor.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    selectors = (deployment["spec"]["selector"], budget["spec"]["selector"], policy["spec"]["podSelector"])
    assert all(selector["matchLabels"] == labels for selector in selectors)
    assert service["spec"]["selector"] == labels == service["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"], "the autoscaler sets it"
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == set(ports.values())
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("rest", DEFAULT_PATH)
    assert server["startupProbe"]["grpc"]["port"] == ports["grpc"]


def test_kustomize_builds_them() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: kustomization.yaml is read, but not built")
    command = ["kubectl", "kustomize", str(FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for document in yaml.safe_load_all(done.stdout):
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
