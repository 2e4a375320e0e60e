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
from tpuembed_serving.core.shards_file import ShardsFile
from tpuembed_serving.telemetry.metrics import DEFAULT_PATH

FOLDER = Path(__file__).parents[2] / "docker" / "k8s"
FOLDERS = ("", "sharded/")
FILES = sorted(
    f"{folder}{path.name}"
    for folder in FOLDERS
    for path in (FOLDER / folder).glob("*.yaml")
    if path.name != "kustomization.yaml"
)
SHARDS = sorted(name for name in FILES if name.startswith("sharded/shard-"))
PODS = ("server.yaml", "sharded/front.yaml", *SHARDS)
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
    pods = [documents(name)[0]["spec"]["template"]["spec"] for name in PODS]
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


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_is_named(folder: str) -> None:
    text = (FOLDER / folder / "kustomization.yaml").read_text()
    files = {path.name for path in (FOLDER / folder).glob("*.yaml")} - {"kustomization.yaml"}
    assert [name for name in files if f"- {name}" not in text] == []
    assert set(yaml.safe_load(text)["resources"]) <= files


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


@pytest.mark.parametrize("name", PODS)
def test_a_pod_has_the_time_to_stop(name: str) -> None:
    deployment, *_ = documents(name)
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


# ---- shards


def labels_of(workload: Any) -> Any:
    return workload["spec"]["template"]["metadata"]["labels"]


def test_shards_differ_by_their_names_alone() -> None:
    assert len(SHARDS) > 1
    first = documents(SHARDS[0])
    for name in SHARDS[1:]:
        shard = Path(name).stem
        assert documents(name) == yaml.safe_load(yaml.safe_dump(first).replace("shard-0", shard))


@pytest.mark.parametrize("name", SHARDS)
def test_replicas_of_a_shard_are_on_different_nodes_and_behind_one_name(name: str) -> None:
    shard = Path(name).stem
    replicas, service, budget = documents(name)
    labels, pod = labels_of(replicas), replicas["spec"]["template"]["spec"]
    assert labels["shard"] == shard
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (spread,) = pod["topologySpreadConstraints"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    selectors = (
        replicas["spec"]["selector"],
        budget["spec"]["selector"],
        rule["labelSelector"],
        spread["labelSelector"],
    )
    assert all(selector["matchLabels"] == labels for selector in selectors)
    assert service["spec"]["selector"] == labels
    assert service["spec"]["clusterIP"] == "None", "gRPC needs the address of each replica"
    assert service["metadata"]["name"] == replicas["spec"]["serviceName"] == shard
    assert replicas["spec"]["replicas"] > budget["spec"]["maxUnavailable"]
    (server,) = pod["containers"]
    claims = {claim["metadata"]["name"] for claim in replicas["spec"]["volumeClaimTemplates"]}
    volumes = claims | {volume["name"] for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in server["volumeMounts"]}
    assert set(mounts.values()) == volumes
    given = options(server)
    assert mounts[given["--cache-dir"]] in claims, "a pod that starts again does not pull its tables again"
    assert given["--grpc-channel-arguments"] == "grpc.max_connection_age_ms=60000"
    assert server["startupProbe"]["grpc"]["service"] == shard


def test_the_front_finds_every_shard() -> None:
    file = ShardsFile.read(FOLDER / "sharded" / "config" / "shards.yaml")
    services = [documents(name)[1] for name in SHARDS]
    ports = [{port["name"]: port["port"] for port in service["spec"]["ports"]}["grpc"] for service in services]
    names = [service["metadata"]["name"] for service in services]
    wanted = [f"dns:///{name}:{port}" for name, port in zip(names, ports, strict=True)]
    assert [shard.address for shard in file.shards] == wanted
    assert [shard.name for shard in file.shards] == names
    front, service, budget = documents("sharded/front.yaml")
    assert file.model == front["metadata"]["name"] == service["metadata"]["name"]
    labels = labels_of(front)
    assert front["spec"]["selector"]["matchLabels"] == budget["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    (server,) = front["spec"]["template"]["spec"]["containers"]
    assert server["startupProbe"]["grpc"]["service"] == file.model


def test_configs_are_where_the_commands_read_them() -> None:
    generated = yaml.safe_load((FOLDER / "sharded" / "kustomization.yaml").read_text())["configMapGenerator"]
    found = {one["name"]: {file.partition("=")[0].rpartition("/")[2] for file in one["files"]} for one in generated}
    for one in generated:
        assert [file for file in one["files"] if not (FOLDER / "sharded" / file.rpartition("=")[2]).is_file()] == []
    for name in ("sharded/front.yaml", *SHARDS):
        pod = documents(name)[0]["spec"]["template"]["spec"]
        (server,) = pod["containers"]
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "config"]
        (place,) = [mount["mountPath"] for mount in server["volumeMounts"] if mount["name"] == "config"]
        files = {f"{place}/{file}" for file in found.pop(volume["configMap"]["name"])}
        assert files == {value for key, value in options(server).items() if key in ("--config", "--shards")}
    assert found == {}, "every one is used"


def test_only_the_front_reaches_the_shards() -> None:
    of_shards, of_front = documents("sharded/network-policy.yaml")
    front, shard = documents("sharded/front.yaml")[0], documents(SHARDS[0])[0]
    assert of_shards["spec"]["podSelector"]["matchLabels"].items() <= labels_of(shard).items()
    assert of_front["spec"]["podSelector"]["matchLabels"] == labels_of(front)
    assert not labels_of(front).items() <= labels_of(shard).items()
    grpc = [rule["from"] for rule in of_shards["spec"]["ingress"] if {"port": 8500} in rule["ports"]]
    assert grpc == [[{"podSelector": {"matchLabels": labels_of(front)}}]]
    (to,) = [rule["to"] for rule in of_front["spec"]["egress"] if {"port": 8500} in rule["ports"]]
    assert to == [{"podSelector": of_shards["spec"]["podSelector"]}]


@pytest.mark.parametrize("folder", FOLDERS)
def test_kustomize_builds_them(folder: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: kustomization.yaml is read, but not built")
    command = ["kubectl", "kustomize", str(FOLDER / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    for document in built:
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
    maps = {document["metadata"]["name"] for document in built if document["kind"] == "ConfigMap"}
    pods = [document["spec"]["template"]["spec"] for document in built if "template" in document.get("spec", {})]
    assert {volume["configMap"]["name"] for pod in pods for volume in pod["volumes"] if "configMap" in volume} == maps
