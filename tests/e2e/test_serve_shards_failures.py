"""Servers of shards that are protected, that do not answer, and whose zeros are marked."""

import contextlib
import json
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
import yaml

from tests.support import capi
from tests.support.serving.doubles import wait_for
from tests.support.serving.process import ServerProcess
from tests.support.serving.shards import FEATURES, Cluster, Trained, requests
from tpuembed import export_saved_model, export_shards

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("exports_in_this_process")]

KEY = "the-key-of-the-shards-0123456789"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


def wait_until_ready_is(server: ServerProcess, wanted: dict[str, Any]) -> None:
    wait_for(lambda: json.loads(server.request("GET", "/readyz")[1]) == wanted)


def wait_until_logged(server: ServerProcess, *texts: str) -> None:
    """Until one of `texts` is in the log."""
    wait_for(lambda: any(text in server.log for text in texts))


def test_shards_behind_tls_and_keys_answer_the_front_alone(trained: Trained, tmp_path: Path) -> None:
    config = {"features": FEATURES}
    export_shards(trained.paths[0], tmp_path / "s", serving_config=config, shards=2)
    whole = export_saved_model(trained.paths[0], tmp_path / "m", serving_config=config).path
    ours, others = trustme.CA(), trustme.CA()
    ours.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name, authority in (("server", ours), ("client", ours), ("stranger", others)):
        issued = authority.issue_cert("shards.example")
        issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / f"{name}.pem")
    (tmp_path / "keys").write_text(f"# one for all shards\nfront: {KEY}\n")
    (tmp_path / "wrong").write_text(f"{KEY[::-1]}\n")
    pem = str(tmp_path / "server.pem")
    protected = ["--tls-cert", pem, "--tls-key", pem, "--tls-client-ca", str(tmp_path / "ca.pem")]
    protected += ["--api-key-file", str(tmp_path / "keys")]
    own = {"certificate": "client.pem", "key": "client.pem"}
    tls = {"ca": "ca.pem", **own, "server_name": "shards.example"}
    inputs = requests(np.random.default_rng(1), 3)
    with ExitStack() as stack:
        cluster = Cluster(tmp_path / "s", tmp_path, stack, of_shards=protected, tls=tls, api_key_file="keys")
        _, found = cluster.ask(inputs)
        for name, value in capi.predict(whole, inputs).items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
        for change, text in (
            ({"api_key_file": "wrong"}, "shard-0: no valid API key"),
            ({"tls": None}, "shard-0: "),
            ({"tls": {"ca": "ca.pem", "server_name": "shards.example"}}, "shard-0: "),
            ({"tls": {**tls, "server_name": "other.example"}}, "shard-0: "),
            ({"tls": {**tls, "certificate": "stranger.pem", "key": "stranger.pem"}}, "shard-0: "),
        ):
            front = cluster.another_front(stack, **change)
            wait_until_ready_is(front, {"status": "not ready", "missing_shards": ["shard-0", "shard-1"]})
            status, reply = front.predict({"instances": [{"one": 1}]})
            assert (status, text in reply["error"]) == (503, True), reply
            assert KEY[::-1] not in front.log
            front.process.kill()


def test_a_front_follows_its_certificates_and_its_key(trained: Trained, tmp_path: Path) -> None:
    """All are replaced while it answers, in the order in which none is refused."""
    export_shards(trained.paths[0], tmp_path / "s", serving_config={"features": FEATURES}, shards=2)
    before, after, others = trustme.CA(), trustme.CA(), trustme.CA()
    new = KEY[::-1]

    def write(name: str, *blobs: trustme.Blob) -> None:
        written = tmp_path / f"{name}.new"
        written.write_bytes(b"".join(blob.bytes() for blob in blobs))
        written.replace(tmp_path / name)

    def issue(name: str, authority: trustme.CA) -> None:
        write(name, authority.issue_cert("shards.example").private_key_and_cert_chain_pem)

    for name in ("ca.pem", "client-ca.pem"):
        write(name, before.cert_pem)
    for name in ("server.pem", "client.pem"):
        issue(name, before)
    (tmp_path / "keys").write_text(f"{KEY}\n")
    (tmp_path / "key").write_text(f"{KEY}\n")
    pem = str(tmp_path / "server.pem")
    protected = ["--tls-cert", pem, "--tls-key", pem, "--tls-client-ca", str(tmp_path / "client-ca.pem")]
    protected += ["--api-key-file", str(tmp_path / "keys")]
    tls = {"ca": "ca.pem", "certificate": "client.pem", "key": "client.pem", "server_name": "shards.example"}
    inputs = requests(np.random.default_rng(1), 3)
    with ExitStack() as stack:
        cluster = Cluster(tmp_path / "s", tmp_path, stack, of_shards=protected, tls=tls, api_key_file="key")
        shards = [server for servers in cluster.servers.values() for server in servers]
        _, wanted = cluster.ask(inputs)

        def follow(text: str, servers: list[ServerProcess], change: Any) -> None:
            """Make a change, and ask until all servers have logged it."""
            known = [server.log.count(text) for server in servers]
            change()
            ends = time.monotonic() + 30
            while any(server.log.count(text) == count for server, count in zip(servers, known, strict=True)):
                assert time.monotonic() < ends, text
                cluster.ask(inputs)
            _, found = cluster.ask(inputs)
            for name, value in wanted.items():
                np.testing.assert_array_equal(found[name], value, err_msg=name)

        certificate, of_front = "TLS certificate", "certificates and key for the shards: read again"
        follow(certificate, shards, lambda: write("client-ca.pem", before.cert_pem, after.cert_pem))
        follow(of_front, [cluster.front], lambda: write("ca.pem", before.cert_pem, after.cert_pem))
        follow(certificate, shards, lambda: issue("server.pem", after))
        follow(of_front, [cluster.front], lambda: issue("client.pem", after))
        follow("API key file", shards, lambda: (tmp_path / "keys").write_text(f"{KEY}\n{new}\n"))
        follow(of_front, [cluster.front], lambda: (tmp_path / "key").write_text(f"{new}\n"))
        follow("API key file", shards, lambda: (tmp_path / "keys").write_text(f"{new}\n"))
        follow(of_front, [cluster.front], lambda: write("ca.pem", after.cert_pem))
        follow(certificate, shards, lambda: write("client-ca.pem", after.cert_pem))
        follow("What was read before stays in use", [cluster.front], lambda: (tmp_path / "ca.pem").write_text("no"))
        write("ca.pem", others.cert_pem)
        wait_until_ready_is(cluster.front, {"status": "ready", "missing_shards": ["shard-0", "shard-1"]})
        with pytest.raises(grpc.RpcError):
            cluster.ask(inputs, timeout=5)
        write("ca.pem", after.cert_pem)
        wait_until_ready_is(cluster.front, {"status": "ready"})
        cluster.ask(inputs)
        assert not [secret for secret in (KEY, new) if secret in cluster.front.log]


def test_zeros_of_a_dead_shard_are_marked_and_counted(trained: Trained, tmp_path: Path) -> None:
    config = {"features": FEATURES}
    plan = export_shards(trained.paths[0], tmp_path / "s", serving_config=config, shards=2)
    whole = export_saved_model(trained.paths[0], tmp_path / "m", serving_config=config).path
    gone = plan.shards[1].features
    assert gone
    inputs = requests(np.random.default_rng(2), 3)
    wanted = capi.predict(whole, inputs)
    with ExitStack() as stack:
        options = ("--rest-timeout-ms", "3000", "--metrics")
        cluster = Cluster(tmp_path / "s", tmp_path, stack, 1, *options, on_failure=dict.fromkeys(gone, "zeros"))
        reply, trailing = cluster.call(inputs)
        assert "x-degraded" not in trailing
        for how in (signal.SIGSTOP, signal.SIGKILL):
            os.kill(cluster.servers["shard-1"][0].process.pid, how)
            reply, trailing = cluster.call(inputs)
            assert trailing["x-degraded"] == ",".join(sorted(gone))
            assert reply.model_spec.version.value == 1
            _, found = cluster.ask(inputs)
            for name, value in wanted.items():
                np.testing.assert_array_equal(
                    found[name], np.zeros_like(value) if name in gone else value, err_msg=name
                )
        body = {"inputs": {name: value.tolist() for name, value in inputs.items() if name != "named"}}
        body["inputs"]["named"] = [[name.decode() for name in row] for row in inputs["named"]]
        with contextlib.closing(cluster.front.connect()) as connection:
            connection.request("POST", f"{cluster.front.path}:predict", json.dumps(body))
            answer = connection.getresponse()
            assert (answer.status, answer.headers["X-Degraded"]) == (200, ",".join(sorted(gone))), answer.read()
        wait_until_ready_is(cluster.front, {"status": "ready", "missing_shards": ["shard-1"]})
        metrics = cluster.front.request("GET", "/monitoring/prometheus/metrics")[1].decode()
        assert ':tpuembed:serving:degraded_count{model_name="s"} 5' in metrics, metrics
        os.kill(cluster.servers["shard-0"][0].process.pid, signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as caught:
            cluster.ask(inputs)
        assert "shard-0" in caught.value.details()


def test_zeros_of_some_features_of_a_shard_are_refused(trained: Trained, tmp_path: Path) -> None:
    plan = export_shards(trained.paths[0], tmp_path / "s", serving_config={"features": FEATURES}, shards=1)
    with ExitStack() as stack:
        cluster = Cluster(tmp_path / "s", tmp_path, stack)
        listed = yaml.safe_load(cluster.file.read_text())["shards"]  # which are refused at the start
        unlisted = [{"name": shard["name"], "address": shard["address"]} for shard in listed]
        for zeros, text in (({"one": "zeros"}, "not that of"), ({"other": "zeros"}, "no output of a shard")):
            front = cluster.another_front(stack, on_failure=zeros, shards=unlisted)
            wait_until_logged(front, text)
            assert front.predict({"instances": [{"one": 1}]})[0] == 503
        front = cluster.another_front(stack, shards=[{**listed[0], "features": ["one"]}])
        wait_until_logged(front, "lists one. It may be another shard's server")
    assert len(plan.shards) == 1


def test_replicas_that_stop_in_turn_are_not_missed(trained: Trained, tmp_path: Path) -> None:
    """A rolling restart: the health check of a server in its lame duck takes it out of the turns."""
    export_shards(trained.paths[0], tmp_path / "s", serving_config={"features": FEATURES}, shards=1)
    inputs = requests(np.random.default_rng(4), 2)
    with ExitStack() as stack:
        cluster = Cluster(tmp_path / "s", tmp_path, stack, 2, of_shards=("--lame-duck-seconds", "3"))
        leaving = cluster.servers["shard-0"][0].process
        leaving.send_signal(signal.SIGTERM)
        times = list[float]()
        while leaving.poll() is None or len(times) < 50:
            started = time.monotonic()
            cluster.ask(inputs)
            times.append(time.monotonic() - started)
        assert max(times) < 5, "no request waited for the one that left"


def test_a_replica_that_hangs_gets_no_more_requests_after_a_while(trained: Trained, tmp_path: Path) -> None:
    export_shards(trained.paths[0], tmp_path / "s", serving_config={"features": FEATURES}, shards=1)
    inputs = requests(np.random.default_rng(4), 2)
    with ExitStack() as stack:
        cluster = Cluster(tmp_path / "s", tmp_path, stack, 2, "--rest-timeout-ms", "20000")
        for _ in range(50):  # so gRPC has sent pings of its own, and one may be on its way
            cluster.ask(inputs)
        hanging = cluster.servers["shard-0"][0].process.pid
        os.kill(hanging, signal.SIGSTOP)
        try:
            deadline, quick = time.monotonic() + 40, 0
            while quick < 20:  # one after the other would come to it
                started = time.monotonic()
                cluster.ask(inputs)
                quick = quick + 1 if time.monotonic() - started < 0.6 else 0
                assert time.monotonic() < deadline
        finally:
            os.kill(hanging, signal.SIGCONT)


def test_answers_are_never_of_two_exports_under_one_number(trained: Trained, tmp_path: Path) -> None:
    config = {"features": FEATURES}
    for number, path in enumerate(trained.paths):
        export_shards(path, tmp_path / f"{number}" / "s", serving_config=config, shards=2)
    inputs = requests(np.random.default_rng(4), 2)
    wanted = [
        capi.predict(export_saved_model(path, tmp_path / "m", serving_config=config).path, inputs)
        for path in trained.paths
    ]
    with ExitStack() as stack:
        (tmp_path / "other").mkdir()
        cluster, other = (
            Cluster(tmp_path / f"{number}" / "s", work, stack)
            for number, work in enumerate((tmp_path, tmp_path / "other"))
        )

        def answers(front: ServerProcess) -> list[int]:
            """Ask often, and return which export each answer is of: 0 or 1. Errors are none."""
            found = []
            for _ in range(30):
                status, reply = front.predict({"inputs": {name: _in_json(value) for name, value in inputs.items()}})
                if status == 200:
                    same = [
                        all(np.allclose(np.float32(reply["outputs"][name]), value, 1e-6) for name, value in one.items())
                        for one in wanted
                    ]
                    assert sum(same) == 1, "mixed"
                    found.append(same.index(True))
            return found

        content = yaml.safe_load(cluster.file.read_text())
        mine, its = (
            [one["address"] for one in yaml.safe_load(each.file.read_text())["shards"]] for each in (cluster, other)
        )
        refused = stack.enter_context(ExitStack())
        front = cluster.another_front(
            refused, shards=[content["shards"][0], {**content["shards"][1], "address": its[1]}]
        )
        wait_until_logged(front, "version 1 of shard shard-0 is of the export ")
        assert json.loads(front.request("GET", "/readyz")[1])["status"] == "not ready"
        status, reply = front.predict({"inputs": {"one": inputs["one"].tolist()}})
        assert (status, "of the export" in reply["error"]) == (503, True)
        refused.close()

        # One of two replicas has the other export. The right one answers, or none does.
        for order in ((mine[0], its[0]), (its[0], mine[0])):
            address = f"{order[0]},{order[1].removeprefix('ipv4:')}"
            with ExitStack() as started:
                front = cluster.another_front(
                    started, shards=[{**content["shards"][0], "address": address}, content["shards"][1]]
                )
                wait_until_logged(front, "ready: ", "is of the export")
                for _ in range(3):
                    assert set(answers(front)) <= {0}
                    time.sleep(1)
                wait_until_logged(front, "Is it a server of this shard?", "is of the export")

        # Servers that are replaced by those of the other export, one after the other.
        assert answers(cluster.front) == [0] * 30
        for number in range(2):
            (server,) = cluster.servers[f"shard-{number}"]
            server.stop()
            port = mine[number].rpartition(":")[2]
            new = ("--config", str(tmp_path / "1" / "s" / f"shard-{number}.config"), "--grpc-port", port)
            stack.enter_context(ServerProcess(None, tmp_path / f"new-{number}.log", *new)).wait_for(1)
            if number == 0:
                for _ in range(3):
                    assert answers(cluster.front) == []
                    time.sleep(1)
        wait_for(lambda: answers(cluster.front)[-1:] == [1])
        assert answers(cluster.front) == [1] * 30


def _in_json(value: "np.ndarray[Any, Any]") -> Any:
    return [[one.decode() for one in row] for row in value] if value.dtype == object else value.tolist()


def test_one_part_of_a_table_under_two_names_is_refused(trained: Trained, tmp_path: Path) -> None:
    features = {name: FEATURES[name] for name in ("one", "listed")}
    export_shards(trained.paths[0], tmp_path / "s", serving_config={"features": features}, shards=2, split={"a": 2})
    models = "".join(
        f'config {{ name: "{name}" base_path: "{tmp_path}/s/shard-0" model_platform: "tensorflow" }} '
        for name in ("shard-0", "shard-1")
    )
    both = tmp_path / "both.config"
    both.write_text(f"model_config_list {{ {models} }}")
    content = yaml.safe_load((tmp_path / "s" / "shards.yaml").read_text())
    with ExitStack() as stack:
        server = stack.enter_context(
            ServerProcess(None, tmp_path / "both.log", "--config", str(both), "--grpc-port", "0")
        )
        server.wait_for(1)
        for shard in content["shards"]:
            shard["address"] = server.grpc_address
        file = tmp_path / "front.yaml"
        file.write_text(yaml.safe_dump(content))
        front = stack.enter_context(ServerProcess(None, tmp_path / "front.log", "--shards", str(file)))
        wait_until_logged(front, "shards shard-0 and shard-1: their servers have the same rows of the same tables")
