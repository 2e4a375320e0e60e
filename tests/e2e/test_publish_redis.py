"""Rows in a real Redis: a front answers as the export itself does, and what is missing or away is an error, never zeros."""

import contextlib
import dataclasses
import json
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
import trustme
from redis.crc import key_slot

from tests.support import redis_servers
from tests.support.contract_command import json_of, tpuembed
from tests.support.contract_serve import Server, config_of, eventually, outputs_of, predict_request
from tests.support.export import named_model, whole_model
from tests.support.export.fakes import write_checkpoint
from tests.support.export.in_process import exports_in_this_process
from tests.support.export.overlays import overlays_of_any_size
from tests.support.messages import refused, said
from tpuembed import export_saved_model
from tpuembed.errors import ExportError
from tpuembed.export import publish_rows as publishing
from tpuembed.manifest import Manifest

pytestmark = redis_servers.needs_redis

Array = npt.NDArray[Any]

SIZES = {"a": (500, 8), "b": (300, 5), "c": (70, 16), "d": (40, 4)}
STORAGE = {"a": "float32", "b": "int8", "c": "bfloat16", "d": "float16"}
ROWS = sum(rows for rows, _ in SIZES.values())
FEATURES: dict[str, Any] = {
    "one": {"table": "a", "input": "id"},
    "half": {"table": "d", "input": "id"},
    "zeros": {"table": "b", "input": "id", "out_of_vocabulary": "zeros"},
    "mean": {"table": "a", "combiner": "mean", "out_of_vocabulary": 9},
    "weighed": {"table": "c", "weighted": True, "combiner": "sqrtn"},
    "sequence": {"table": "b", "max_sequence_length": 3},
}
PLAIN = {name: spec for name, spec in FEATURES.items() if "weighted" not in spec}
MODELS = ("lookups", "variables", "whole", "dense", "named")


def tables(seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in SIZES.items()}


def draw(random: np.random.Generator, batch: int, features: Mapping[str, Any] = FEATURES) -> dict[str, Array]:
    """Return inputs of an export of lookups, some of them outside their tables where a feature has a policy."""
    inputs: dict[str, Array] = {}
    for name, spec in features.items():
        rows = SIZES[spec["table"]][0]
        shape = (batch,) if spec.get("input") == "id" else (batch, int(random.integers(1, 6)))
        ids = random.integers(0, rows, shape)
        if "out_of_vocabulary" in spec:
            ids = np.where(random.random(shape) < 0.3, rows + 30, ids)
        if len(shape) == 2:
            ids = np.where(random.random(shape) < 0.3, -1, ids)
        inputs[name] = ids
        if spec.get("weighted"):
            inputs[f"{name}_weights"] = random.choice(np.array([0, 0.5, 1, -1, 3], np.float32), shape)
    return inputs


DRAW: dict[str, Callable[[np.random.Generator, int], dict[str, Array]]] = {
    "lookups": draw,
    "variables": lambda random, batch: draw(random, batch, PLAIN),
    "whole": lambda random, batch: whole_model.draw(random, batch, 4),
    "dense": lambda random, batch: whole_model.draw(random, batch, 3),
    "named": lambda random, batch: named_model.draw(random, batch, 4),
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports of all kinds. `lookups` has version 1, full; 2, an overlay of it with changed rows; 3, other rows."""
    folder = tmp_path_factory.mktemp("exports")
    changed = tables(1)
    for name, table in changed.items():
        table[::9] = tables(2)[name][::9]
    with exports_in_this_process(), overlays_of_any_size(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there are no requests to warm up, and no serving_examples
        for number, content in ((1, tables(1)), (2, changed), (3, tables(4))):
            path = folder / "ckpt"
            write_checkpoint(path, content)
            base: dict[str, Any] = {"base": "latest"} if number == 2 else {}
            given: dict[str, Any] = {"serving_config": {"features": FEATURES}, "storage": STORAGE}
            export_saved_model(path, folder / "lookups", **given, layout="mmap", **base)
        export_saved_model(path, folder / "variables", serving_config={"features": PLAIN}, storage="int8")
        export_saved_model(whole_model.build(is_lazy=True), folder / "whole", layout="mmap", storage="bfloat16")
        export_saved_model(whole_model.build(), folder / "dense")
        export_saved_model(named_model.build(), folder / "named")
    return folder


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis_servers.Server]:
    with redis_servers.server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis(running: redis_servers.Server) -> redis_servers.Server:
    """An empty Redis, for tests that serve nothing."""
    with running.client() as client:
        client.select(1)
        client.flushdb()
    return running


def url_of(redis: redis_servers.Server) -> str:
    return f"{redis.url}/1"


@dataclasses.dataclass(frozen=True)
class Served:
    """One server with each export, and with its front as `front_NAME`."""

    server: Server
    redis: redis_servers.Server
    fronts: Path

    def both(self, model: str, inputs: Mapping[str, Array], signature: str = "") -> tuple[Any, Any]:
        """Return what the front answers over gRPC, and what the export answers: outputs, or the code and the text of an error."""
        return (
            ask(self.server, f"front_{model}", inputs, signature),
            ask(self.server, model, inputs, signature),
        )


def ask(server: Server, model: str, inputs: Mapping[str, Array], signature: str = "") -> Any:
    try:
        return outputs_of(server.prediction.Predict(predict_request(model, inputs, signature), timeout=60))
    except grpc.RpcError as error:
        return error.code(), error.details()


def assert_same(found: Any, expected: Any) -> None:
    """Compare to the last bit."""
    assert type(found) is type(expected), (found, expected)
    if isinstance(expected, tuple):
        assert found == expected
        return
    assert sorted(found) == sorted(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name, strict=True)


@pytest.fixture(scope="module")
def served(exports: Path, running: redis_servers.Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    for model in MODELS:
        number = ("--version", "2") if model == "lookups" else ()
        done = tpuembed("publish", exports / model, running.url, folder / f"front_{model}", *number)
        assert done.returncode == 0, done
        (folder / model).symlink_to(exports / model)
    versions = "model_version_policy { specific { versions: 2 } }"
    models = {name: "" for model in MODELS for name in (model, f"front_{model}")} | {"lookups": versions}
    (folder / "models.config").write_text(config_of(folder, models))
    options = ("--config", str(folder / "models.config"), "--row-store", running.url, "--lookups", "native")
    with Server(None, folder / "log", *options, "--metrics") as server:
        eventually(server.is_ready)
        yield Served(server, running, folder)
    assert "Traceback" not in server.log


# ---- answers


@pytest.mark.parametrize("model", ["lookups", "whole"])
def test_answers_are_those_of_the_export(served: Served, model: str) -> None:
    """To the last bit of mapped tables that the C library looks up."""
    random = np.random.default_rng(7)
    for batch in (1, 3, 200):
        found, expected = served.both(model, DRAW[model](random, batch))
        assert isinstance(expected, dict), expected
        assert_same(found, expected)


@pytest.mark.parametrize("model", ["variables", "dense", "named"])
def test_answers_of_layout_variables(served: Served, model: str) -> None:
    """TensorFlow looks up in such an export, and its sums have another order."""
    random = np.random.default_rng(8)
    for batch in (1, 3, 200):
        found, expected = served.both(model, DRAW[model](random, batch))
        assert sorted(found) == sorted(expected)
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


def test_rest_and_open_inference(served: Served) -> None:
    random = np.random.default_rng(5)
    for model in ("lookups", "dense"):
        inputs = {name: value[:2] for name, value in DRAW[model](random, 3).items()}
        inputs = {name: np.nan_to_num(value) if value.dtype.kind == "f" else value for name, value in inputs.items()}
        body = {"inputs": {name: value.tolist() for name, value in inputs.items()}}
        replies = [served.server.post(f"{name}:predict", body) for name in (f"front_{model}", model)]
        assert [reply.status for reply in replies] == [200, 200], replies
        if model == "lookups":
            assert replies[0].value == replies[1].value
    inputs = draw(random, 4)
    types = {"i": "INT64", "f": "FP32"}
    tensors = [
        {"name": name, "shape": value.shape, "datatype": types[value.dtype.kind], "data": value.reshape(-1).tolist()}
        for name, value in inputs.items()
    ]
    ours, theirs = (
        served.server.ask("POST", f"/v2/models/{name}/infer", {"inputs": tensors})
        for name in ("front_lookups", "lookups")
    )
    assert (ours.status, ours.value["outputs"]) == (200, theirs.value["outputs"])
    lists = {"inputs": {name: value.tolist() for name, value in inputs.items()}}
    lists["inputs"]["mean"] = [[1], [], [2, 3, 4], [5]]
    replies = [served.server.post(f"{name}:predict", lists) for name in ("front_lookups", "lookups")]
    assert replies[0].value == replies[1].value
    assert replies[0].status == 200


def test_bad_ids_fail_as_they_do_for_the_export(served: Served) -> None:
    before = commands(served.redis)
    random = np.random.default_rng(6)
    given = draw(random, 5)
    for name, value in (("one", 10_000), ("weighed", -7), ("sequence", 10_000), ("half", -1)):
        wrong = given[name].copy()
        wrong[3, ...] = value
        found, expected = served.both("lookups", {**given, name: wrong})
        assert expected[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert_same(found, expected)
    for model, name, bad in (("whole", "triples", 10**6), ("dense", "one", -5)):
        inputs = DRAW[model](random, 3)
        inputs[name] = np.full_like(inputs[name], bad)
        found, expected = served.both(model, inputs)
        assert expected[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert_same(found, expected)
    inputs = DRAW["named"](random, 2)
    found, expected = served.both("named", {**inputs, "user": np.array([b"nobody", b"\0"], object)})
    assert (found[0], expected[0]) == (grpc.StatusCode.INVALID_ARGUMENT,) * 2
    assert "name 'nobody' of row 0 is not in the vocabulary" in found[1]
    assert commands(served.redis) == before, "nothing is fetched for a request that is refused"


def commands(redis: redis_servers.Server) -> int:
    """Return how many MGET commands Redis has run."""
    with redis.client() as client:
        found = client.info("commandstats").get("cmdstat_mget", {"calls": 0})
    return int(found["calls"])


def test_weights_must_fit_their_ids(served: Served) -> None:
    inputs = whole_model.draw(np.random.default_rng(1), 3, 3)
    inputs["heavy"] = np.array([[1, 2, -1], [3, -1, -1], [-1, -1, -1]])
    inputs["heavy_weights"] = np.array([[1, -2, np.nan], [0, 0, 0], [np.nan, 0, 0]], np.float32)
    found, expected = served.both("whole", inputs)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-6, atol=2e-6, err_msg=name)
    for place, value in (((0, 1), np.nan), ((1, 2), 4.0)):
        wrong = inputs["heavy_weights"].copy()
        wrong[place] = value
        found, expected = served.both("whole", {**inputs, "heavy_weights": wrong})
        assert (found[0], expected[0]) == (grpc.StatusCode.INVALID_ARGUMENT,) * 2
        assert "input heavy_weights must have as many values as heavy in every row" in found[1]
    negative = {**inputs, "heavy": np.array([[1, 2, -3], [3, -1, -1], [-1, -1, -1]])}  # its weight is one of an id
    for last in (2.0, np.nan):
        weights = np.array([[1, -2, last], [0, 0, 0], [np.nan, 0, 0]], np.float32)
        found, expected = served.both("whole", {**negative, "heavy_weights": weights})
        assert type(found) is type(expected), (found, expected)
        for name, values in expected.items() if isinstance(expected, dict) else ():
            np.testing.assert_allclose(found[name], values, rtol=2e-6, atol=2e-6, err_msg=name)
    found, _ = served.both("whole", {**inputs, "heavy_weights": inputs["heavy_weights"][:, :2]})
    assert found == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "input heavy_weights must have as many values as heavy; their shapes are [3, 2] and [3, 3]",
    )


def test_other_signatures(served: Served) -> None:
    code, text = ask(served.server, "front_lookups", {"examples": np.array([b""], object)}, "serving_examples")
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert text == (
        "signature serving_examples looks up in the graph, and the rows are in Redis. Send the inputs of serving_default"
    )
    features = {name: np.zeros((2, 4), np.float32) for name in ("one",)}
    assert ask(served.server, "front_whole", features, "from_activations")[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_a_batch_fetches_each_row_once(served: Served) -> None:
    one = draw(np.random.default_rng(2), 1)
    wanted = ask(served.server, "lookups", one)
    before = commands(served.redis)
    assert_same(
        ask(served.server, "front_lookups", {name: value.repeat(500, 0) for name, value in one.items()}),
        {name: value.repeat(500, 0) for name, value in wanted.items()},
    )
    assert commands(served.redis) == before + 1, "all rows of all tables are in one command"
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: ask(served.server, "front_lookups", one), range(200)))
    for each in found:
        assert_same(each, wanted)
    assert commands(served.redis) <= before + 1 + 200


def test_tools_on_a_front(served: Served) -> None:
    front = served.fronts / "front_lookups" / "2"
    assert json_of("describe", front)["tables"]
    for one in (front, served.fronts / "front_whole" / "1"):
        done = tpuembed("verify", one)
        assert done.returncode == 0, done
    said(tpuembed("head", front, "a").refused())
    said(tpuembed("relocate", served.fronts / "front_whole" / "1", "/srv/rec").refused())
    assert not list(front.rglob("*.staging*"))
    with pytest.raises(ValueError, match="incompatible"):  # no other program takes zeros for rows that it does not have
        tf.saved_model.load(str(served.fronts / "front_variables" / "1"))


# ---- failures


def test_a_server_without_a_row_store_refuses(served: Served, tmp_path: Path) -> None:
    with Server(served.fronts / "front_lookups", tmp_path / "log") as server:
        eventually(lambda: "--row-store" in server.log)
        said(server.statuses()[2]["status"]["error_message"])
        assert server.get("/readyz").status == 503


def test_a_lost_row(exports: Path, running: redis_servers.Server, tmp_path: Path) -> None:
    url = f"{running.url}/2"
    tpuembed("publish", exports / "lookups", url, tmp_path / "rec", "--version", "1")
    inputs = {name: value.tolist() for name, value in draw(np.random.default_rng(4), 3).items()}
    inputs["one"] = [5, 6, 7]
    with Server(tmp_path / "rec", tmp_path / "log", "--row-store", url) as server, running.client(db=2) as client:
        eventually(server.is_ready)
        answer = server.post("rec:predict", {"inputs": inputs})
        assert answer.status == 200
        (array,) = [key for key in client.hkeys("tpuembed:rec") if b'"rows": 500' in client.hget("tpuembed:rec", key)]
        id_ = array.decode().removeprefix("array:")
        (key,) = client.keys(f"*rec:{id_}:{6:010x}")
        content = client.get(key)
        for damaged, fault in ((content[:-1], "has 31 bytes, and a row has 32"), (None, "is missing")):
            client.delete(key) if damaged is None else client.set(key, damaged)
            lost = server.post("rec:predict", {"inputs": inputs})
            assert lost.status == 500
            assert f"row 6 of table a {fault}" in lost.error
            said(lost.error)
        others = server.post("rec:predict", {"inputs": {**inputs, "one": [5, 5, 7]}})
        assert others.status in (200, 500), "row 6 may be in a list of the same table"
        assert json_of("publish", exports / "lookups", url, tmp_path / "rec", "--version", "1")["rows_written"] == 0
        mended = json_of("publish", exports / "lookups", url, tmp_path / "rec", "--version", "1", "--rewrite")
        assert mended["rows_written"] == ROWS
        assert server.post("rec:predict", {"inputs": inputs}).value == answer.value


@pytest.mark.parametrize("workers", [1, 2])
def test_a_redis_that_is_killed_under_load(exports: Path, tmp_path: Path, workers: int) -> None:
    body = {"inputs": {name: value.tolist() for name, value in draw(np.random.default_rng(4), 3).items()}}
    with redis_servers.server(tmp_path / "redis") as redis:
        json_of("publish", exports / "lookups", redis.url, tmp_path / "rec")
        options = ("--row-store", redis.url, "--workers", str(workers))
        with Server(tmp_path / "rec", tmp_path / "log", *options) as server:
            eventually(server.is_ready)
            answer = server.post("rec:predict", body).value
            stop, replies = threading.Event(), list[Any]()

            def load() -> None:
                while not stop.is_set():
                    reply = server.post("rec:predict", body)
                    replies.append((reply.status, reply.value))

            threads = [threading.Thread(target=load) for _ in range(4)]
            for thread in threads:
                thread.start()
            time.sleep(0.5)
            redis.kill()
            eventually(lambda: any(status == 503 for status, _ in replies))
            started = time.monotonic()
            assert server.post("rec:predict", body).status == 503
            assert time.monotonic() - started < 5
            with redis_servers.server(tmp_path / "again", port=redis.port):
                json_of("publish", exports / "lookups", redis.url, tmp_path / "rec")
                eventually(lambda: server.post("rec:predict", body).status == 200)
                stop.set()
                for thread in threads:
                    thread.join()
            assert {status for status, _ in replies} <= {200, 503, 500}
            for status, value in replies:
                assert value == answer if status == 200 else "Redis at" in value["error"]


def test_a_redis_that_hangs(exports: Path, tmp_path: Path) -> None:
    body = {"inputs": {name: value.tolist() for name, value in draw(np.random.default_rng(4), 3).items()}}
    with redis_servers.server(tmp_path / "redis") as redis:
        json_of("publish", exports / "lookups", redis.url, tmp_path / "rec")
        options = ("--row-store", redis.url, "--rest-timeout-ms", "3000")
        with Server(tmp_path / "rec", tmp_path / "log", *options) as server:
            eventually(server.is_ready)
            eventually(lambda: server.post("rec:predict", body).status == 200)
            redis.process.send_signal(signal.SIGSTOP)
            eventually(lambda: server.post("rec:predict", body).status == 503)
            started = time.monotonic()
            for _ in range(20):  # they hold no thread that answers other models
                assert server.post("rec:predict", body).status == 503
            assert time.monotonic() - started < 2
            redis.process.send_signal(signal.SIGCONT)
            eventually(lambda: server.post("rec:predict", body).status == 200)


def test_rows_that_take_too_much_memory(exports: Path, running: redis_servers.Server, tmp_path: Path) -> None:
    """The rows of the request are counted, beside its inputs and outputs."""
    url = f"{running.url}/3"
    json_of("publish", exports / "lookups", url, tmp_path / "rec", "--version", "1")
    with Server(tmp_path / "rec", tmp_path / "log", "--row-store", url, "--max-request-memory", "96KiB") as server:
        eventually(server.is_ready)
        inputs = draw(np.random.default_rng(1), 1)
        assert isinstance(ask(server, "rec", inputs), dict)
        code, text = ask(server, "rec", {**inputs, "mean": np.arange(400)[None]})
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the rows of the request need about 0.1 MiB of memory" in text


# ---- publishing


def test_versions_while_they_are_served(exports: Path, running: redis_servers.Server, tmp_path: Path) -> None:
    """An overlay writes its changed rows alone, older versions leave, and every answer is that of one version."""
    url, front = f"{running.url}/4", tmp_path / "rec"
    first = json_of("publish", exports / "lookups", url, front, "--version", "1")
    assert (first["rows_written"], first["bytes_reused"], first["removed"]) == (ROWS, 0, [])
    ids = {name: value.tolist() for name, value in draw(np.random.default_rng(9), 40).items()}
    with Server(front, tmp_path / "log", "--row-store", url) as server:
        eventually(server.is_ready)
        stop, replies = threading.Event(), list[Any]()

        def load() -> None:
            while not stop.is_set():
                reply = server.post("rec:predict", {"inputs": ids})
                replies.append((reply.status, reply.body))

        thread = threading.Thread(target=load)
        thread.start()
        overlay = json_of("publish", exports / "lookups", url, front, "--version", "2")
        assert overlay["rows_written"] == sum(-(-rows // 9) for rows, _ in SIZES.values())
        assert overlay["bytes_reused"] == first["bytes_written"]
        server.wait_for(2)
        third = json_of("publish", exports / "lookups", url, front)
        assert (third["version"], third["removed"], third["path"]) == (3, [1], str(front / "3"))
        server.wait_for(3)
        eventually(lambda: server.post("rec:predict", {"inputs": ids}).body == replies[-1][1])
        stop.set()
        thread.join()
    assert {status for status, _ in replies} == {200}
    assert len({body for _, body in replies}) == 3
    assert sorted(path.name for path in front.iterdir()) == ["2", "3"]
    with running.client(db=4) as client:
        assert client.dbsize() == 1 + 2 * ROWS + overlay["rows_written"]
        last = json_of("publish", exports / "lookups", url, front, "--keep", "1")
        assert (last["rows_written"], last["removed"], client.dbsize()) == (0, [2], 1 + ROWS)


def test_the_way_back_goes_over_the_model_dir(exports: Path, redis: redis_servers.Server, tmp_path: Path) -> None:
    """Commands that know nothing of Redis change no front: a rolled-back number would be that of the next export."""
    front, models = tmp_path / "rec", tmp_path / "models"
    shutil.copytree(exports / "lookups", models)
    for version in ("1", "3"):
        json_of("publish", models, url_of(redis), front, "--version", version)
    for command in ("rollback", "prune", "compact"):
        said(tpuembed(command, front).refused())
    assert tpuembed("rollback", models, "1").returncode == 0
    done = json_of("publish", models, url_of(redis), front)
    assert (done["version"], done["rows_written"], done["removed"]) == (4, 0, [1])
    older = tpuembed("publish", models, url_of(redis), front, "--version", "3")
    assert older.returncode == 0
    said(older.stderr)


def test_two_folders_of_one_name_do_not_remove_each_others_rows(
    exports: Path, redis: redis_servers.Server, tmp_path: Path
) -> None:
    first, second = tmp_path / "a" / "rec", tmp_path / "b" / "rec"
    json_of("publish", exports / "lookups", url_of(redis), first, "--version", "1")
    with redis.client(db=1) as client:
        before = client.dbsize()
        said(tpuembed("publish", exports / "lookups", url_of(redis), second, "--version", "3", "--keep", "1").refused())
        assert client.dbsize() == before
    json_of("publish", exports / "lookups", url_of(redis), second, "--version", "3", "--name", "other")
    shutil.rmtree(first)
    done = json_of("publish", exports / "lookups", url_of(redis), first, "--version", "3", "--rewrite", "--keep", "1")
    assert done["removed"] == [1]


def test_a_version_without_its_rows_is_not_loaded(exports: Path, redis: redis_servers.Server, tmp_path: Path) -> None:
    """The version before is served until they are there. So is it while Redis is away."""
    front = tmp_path / "rec"
    inputs = {name: value.tolist() for name, value in draw(np.random.default_rng(9), 4).items()}
    json_of("publish", exports / "lookups", url_of(redis), front, "--version", "1")
    with Server(front, tmp_path / "log", "--row-store", url_of(redis)) as server:
        eventually(server.is_ready)
        answer = server.post("rec:predict", {"inputs": inputs}).value
        json_of("publish", exports / "lookups", f"{redis.url}/8", tmp_path / "elsewhere" / "rec", "--version", "3")
        shutil.copytree(tmp_path / "elsewhere" / "rec" / "3", front / "3")
        eventually(lambda: "rows of model rec are not there" in server.log)
        said(server.statuses()[3]["status"]["error_message"])
        assert server.post("rec:predict", {"inputs": inputs}).value == answer
        with redis.client(db=1) as client:
            client.flushdb()
        assert server.post("rec:predict", {"inputs": inputs}).status == 500
        done = json_of("publish", exports / "lookups", url_of(redis), front, "--version", "3", "--keep", "1")
        assert done["removed"] == [1], "its rows are lost, so no server could load it again"
        server.wait_for(3)
        assert server.post("rec:predict", {"inputs": inputs}).status == 200
        assert server.log.count("requests fail: Redis at") == 1


# A publish that was stopped, or whose Redis lost its content, writes nothing more that another one would believe.


def rows_in(client: Any) -> int:
    """The rows in a database with one model."""
    return sum(b":" in key and not key.startswith(b"tpuembed:") for key in client.keys("*"))


def test_a_redis_that_loses_its_content_during_a_publish(
    exports: Path, redis: redis_servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_CHUNK_ROWS", 40)
    with redis.client(db=1) as client:

        def flush(done: int, total: int) -> None:
            if done > total / 2:
                client.flushdb()

        with refused(ExportError, match="has lost its content"):
            publishing.publish_rows(exports / "lookups", url_of(redis), tmp_path / "rec", version=1, on_progress=flush)
        assert json_of("publish", exports / "lookups", url_of(redis), tmp_path / "rec", "--version", "1")
        assert rows_in(client) == ROWS


def test_a_publish_that_was_stopped_leaves_the_next_one_alone(
    exports: Path, redis: redis_servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_CHUNK_ROWS", 40)
    arguments = (exports / "lookups", url_of(redis), tmp_path / "rec")
    with redis.client(db=1) as client:

        def overtaken(*_: int) -> None:
            if client.delete("tpuembed:rec:lease"):  # as if it had expired
                publishing.publish_rows(*arguments, version=3, keep=1)

        with refused(ExportError, match="another process publishes"):
            publishing.publish_rows(*arguments, version=1, on_progress=overtaken)
        assert (tmp_path / "rec" / "3").is_dir()
        assert not (tmp_path / "rec" / "1").exists()
        keys = {key.rpartition(b":")[0] for key in client.keys("{*")}
        published = {f"array:{one}".encode() for one in json.loads(client.hget("tpuembed:rec", "version:3"))["arrays"]}
        whole = {name: json.loads(client.hget("tpuembed:rec", name)) for name in published}
        assert all(record["rows"] == record["written"] for record in whole.values())
        assert published <= {b"array:" + key.rpartition(b":")[2] for key in keys}
        publishing.publish_rows(*arguments, version=3, keep=1)
        assert rows_in(client) == ROWS


def test_a_digest_that_takes_longer_than_the_lease(
    exports: Path, redis: redis_servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = publishing._digest

    def slow(*arguments: Any) -> Any:
        time.sleep(0.3)
        return digest(*arguments)

    monkeypatch.setattr(publishing, "_LEASE_SECONDS", 0.2)
    monkeypatch.setattr(publishing, "_digest", slow)
    done = publishing.publish_rows(exports / "lookups", url_of(redis), tmp_path / "rec", version=1)
    assert done.rows_written == ROWS


def test_rows_that_change_during_a_publish_are_not_written(
    exports: Path, redis: redis_servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_CHUNK_ROWS", 40)
    models = tmp_path / "models"
    shutil.copytree(exports / "lookups", models)
    manifest = Manifest.read(models / "1")
    assert manifest is not None
    array = max((array for stack in manifest.stacks for array in stack.arrays), key=lambda array: array.rows)

    def damage(*_: int) -> None:
        with open(models / "1" / array.file, "r+b") as file:
            file.seek(array.offset + array.size - 1)
            file.write(b"\x5a")

    with refused(ExportError, match="changed while it was published"):
        publishing.publish_rows(models, url_of(redis), tmp_path / "rec", version=1, on_progress=damage)
    assert not (tmp_path / "rec" / "1").exists()


def test_a_rewrite_that_is_interrupted_leaves_no_row_that_nobody_removes(
    exports: Path, redis: redis_servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_CHUNK_ROWS", 40)
    arguments = (exports / "lookups", url_of(redis), tmp_path / "rec")

    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    publishing.publish_rows(*arguments, version=1)
    with pytest.raises(KeyboardInterrupt):
        publishing.publish_rows(*arguments, version=3, rewrite=True, on_progress=stop)
    publishing.publish_rows(*arguments, version=1, keep=1)
    with redis.client(db=1) as client:
        assert rows_in(client) == ROWS


def test_a_server_waits_for_its_redis(exports: Path, redis: redis_servers.Server, tmp_path: Path) -> None:
    front = tmp_path / "rec"
    json_of("publish", exports / "lookups", url_of(redis), front, "--version", "1")
    with redis.client(db=1) as client:
        client.config_set("requirepass", "secret")
        with Server(front, tmp_path / "log", "--row-store", url_of(redis)) as server:
            eventually(lambda: "asks for a password" in server.log)
            assert server.get("/readyz").status == 503
            client.config_set("requirepass", "")
            eventually(server.is_ready)


def test_an_interrupted_publish_resumes(
    exports: Path, redis: redis_servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_CHUNK_ROWS", 40)

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publishing.publish_rows(exports / "lookups", url_of(redis), tmp_path / "rec", version=1, on_progress=stop)
    assert list((tmp_path / "rec").iterdir()) == []
    with redis.client(db=1) as client:
        written = client.dbsize() - 1
    assert 0 < written < ROWS
    arguments = ("publish", exports / "lookups", url_of(redis), tmp_path / "rec")
    again = json_of(*arguments, "--version", "1")["rows_written"]
    assert ROWS - written <= again <= ROWS - written + 40, "the last chunk may not have been recorded"
    with pytest.raises(KeyboardInterrupt):
        publishing.publish_rows(exports / "lookups", url_of(redis), tmp_path / "rec", version=3, on_progress=stop)
    json_of(*arguments, "--version", "2", "--keep", "1")
    with redis.client(db=1) as client:
        assert client.dbsize() == 1 + ROWS + sum(-(-rows // 9) for rows, _ in SIZES.values())


def test_the_command(exports: Path, redis: redis_servers.Server, tmp_path: Path) -> None:
    url, front = url_of(redis), tmp_path / "rec"
    done = tpuembed("publish", exports / "lookups", url, front, "--version", "1", "--name", "other")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout == f"{front}/1: 910 rows, 22.5 kB written to {url} as model other\n"
    done = tpuembed("publish", exports / "lookups", url, front, "--version", "1", "--name", "other")
    assert done.stdout == f"{front}/1: 0 rows, 0 B written to {url} as model other, 22.5 kB were there\n"


def test_what_cannot_be_published(exports: Path, redis: redis_servers.Server, tmp_path: Path) -> None:
    lookups, url, front = exports / "lookups", url_of(redis), tmp_path / "rec"

    def refused(*arguments: str | Path) -> str:
        error = tpuembed("publish", *arguments).refused()
        said(error)
        return error

    refused(tmp_path / "none", url, front)
    refused(lookups, url, front, "--version", "7")
    refused(lookups, url, lookups)
    refused(lookups, url, lookups / "3")
    (tmp_path / "file").touch()
    refused(lookups, url, tmp_path / "file")
    refused(lookups, url, "s3://bucket/rec")
    refused(lookups, url, front, "--name", "a b")
    refused(lookups, "redis://127.0.0.1:1", front)
    assert tpuembed("publish", lookups, url, front, "--keep", "0").returncode == 2
    assert not front.exists() or not list(front.iterdir())

    json_of("publish", lookups, url, front, "--version", "1")
    refused(front, url, tmp_path / "again")
    refused(exports / "variables", url, front)  # which has another version 1
    refused(exports / "variables", url, tmp_path / "other" / "rec")  # of the same name in Redis
    shutil.copytree(lookups / "3", tmp_path / "damaged" / "3")
    file = max((tmp_path / "damaged" / "3" / "variables").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    for _ in range(2):
        refused(tmp_path / "damaged", url, front)
    with redis.client(db=1) as client:
        assert client.dbsize() == 1 + ROWS
        lock = client.lock("tpuembed:rec:lease", timeout=60)
        assert lock.acquire(blocking=False)
        refused(lookups, url, front, "--version", "3")
        lock.release()
    json_of("publish", lookups, url, front, "--version", "3")


@pytest.mark.parametrize(
    "url",
    [
        "u:s3cret@host:6379",
        "host:6379",
        "REDIS://host:1",
        "redis://",
        "redis://host:x",
        "redis://u:s3cret@host:1/0",
        "redis://host:1/abc",
        "redis://host:1/1/2",
        "redis://host:1/1#2",
        "redis://host?password=s3cret",
        "redis://host:1?ssl_ca_certs=ca.pem",
        "rediss://host:1?ssl_ca_cert=ca.pem",
    ],
)
def test_urls_that_are_refused(exports: Path, tmp_path: Path, url: str) -> None:
    error = tpuembed("publish", exports / "lookups", url, tmp_path / "rec").refused()
    said(error)
    assert "s3cret" not in error
    assert "s3cret" not in tpuembed("serve", tmp_path, "--no-grpc", "--row-store", url).refused()


def test_passwords(exports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "TPUEMBED_REDIS_PASSWORD"
    monkeypatch.delenv(variable, raising=False)
    arguments = ("publish", exports / "lookups")
    with redis_servers.server(tmp_path / "redis", "--requirepass", "s3cret-0") as redis:
        said(tpuembed(*arguments, redis.url, tmp_path / "rec").refused())
        monkeypatch.setenv(variable, "s3cret-1")
        error = tpuembed(*arguments, redis.url, tmp_path / "rec").refused()
        said(error)
        assert "s3cret" not in error
        monkeypatch.setenv(variable, "s3cret-0")
        assert json_of(*arguments, redis.url, tmp_path / "rec")["rows_written"] == ROWS


def test_tls(exports: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    paths = {name: tmp_path / f"{name}.pem" for name in ("ca-cert", "cert", "key")}
    authority.cert_pem.write_to_path(paths["ca-cert"])
    issued = authority.issue_cert("localhost")
    issued.private_key_pem.write_to_path(paths["key"])
    issued.cert_chain_pems[0].write_to_path(paths["cert"])
    with redis_servers.server(tmp_path / "redis", tls=paths) as redis:
        assert json_of("publish", exports / "lookups", redis.url, tmp_path / "rec")["rows_written"] == ROWS
        plain = redis.url.partition("?")[0]
        error = tpuembed("publish", exports / "lookups", plain, tmp_path / "rec").refused()
        assert "certificate verify failed" in error.lower().replace("_", " ")


# ---- clusters


@contextlib.contextmanager
def serving_from_cluster(exports: Path, folder: Path) -> Iterator[tuple[redis_servers.Cluster, Server]]:
    with redis_servers.cluster(folder / "cluster") as cluster:
        for version in ("1", "2"):
            json_of("publish", exports / "lookups", cluster.url, folder / "rec", "--version", version)
        with Server(folder / "rec", folder / "log", "--row-store", cluster.url, "--lookups", "native") as server:
            eventually(server.is_ready)
            yield cluster, server


def test_a_cluster(served: Served, exports: Path, tmp_path: Path) -> None:
    """Its rows are on all masters, and a slot may move while it is read."""
    inputs = draw(np.random.default_rng(11), 300)
    wanted = ask(served.server, "lookups", inputs)
    with serving_from_cluster(exports, tmp_path) as (cluster, server):
        assert_same(ask(server, "rec", inputs), wanted)
        shares = []
        for node in cluster.nodes[:3]:
            with node.client() as client:
                shares.append(client.dbsize())
        with cluster.nodes[0].client() as client:
            slot = key_slot(client.keys("{*rec:*")[0])
        assert min(shares) > 0.7 * sum(shares) / 3, shares
        with cluster.moving(slot):
            assert_same(ask(server, "rec", inputs), wanted)
        assert_same(ask(server, "rec", inputs), wanted)
        third = json_of("publish", exports / "lookups", cluster.url, tmp_path / "rec")
        assert (third["rows_written"], third["removed"]) == (ROWS, [1])


@pytest.mark.nightly
def test_a_cluster_whose_master_dies(served: Served, exports: Path, tmp_path: Path) -> None:
    """Its requests fail while nobody has its rows, and succeed when its replica has taken its place."""
    inputs = draw(np.random.default_rng(11), 300)
    wanted = ask(served.server, "lookups", inputs)
    with serving_from_cluster(exports, tmp_path) as (cluster, server):
        cluster.replicate()
        cluster.nodes[1].kill()
        assert code_of(ask(server, "rec", inputs)) is grpc.StatusCode.UNAVAILABLE
        cluster.promote(1)
        ends = time.monotonic() + 60
        while code_of(answer := ask(server, "rec", inputs)) is not grpc.StatusCode.OK:
            assert time.monotonic() < ends, (answer, server.log, cluster.views())
            time.sleep(0.05)
        assert_same(answer, wanted)


def code_of(answer: Any) -> grpc.StatusCode:
    code: grpc.StatusCode = answer[0] if isinstance(answer, tuple) else grpc.StatusCode.OK
    return code
