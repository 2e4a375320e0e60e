"""Whole servers whose features take names: hostile ones and unknown ones, of many clients at once."""

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.export.fakes import random_table, write_checkpoint
from tests.support.messages import said
from tests.support.serving.process import ServerProcess
from tpuembed import Vocabulary, export_saved_model
from tpuembed.config import ServingConfig, ServingFeature
from tpuembed_serving.tensorflow import session as runtime

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

HOSTILE = [b"a\0b", b"\xff\xfe", "naïve 東京".encode(), b"'", b'"\\', b"\n", b"x" * (1 << 20), b"[UNK]", b"0"]
USERS = [*HOSTILE, *(f"user {number}".encode() for number in range(200))]
ITEMS = [2**53 + 1, 2**53, -5, 2**63 - 1, -(2**63), *range(100, 300)]
ROWS = 300
VALUES = {"users": random_table(ROWS, 6), "items": random_table(ROWS, 4, seed=1)}
CONFIG = """
model_config_list {{ config {{ name: "m" base_path: "{path}/m" model_platform: "tensorflow" }}
                     config {{ name: "v" base_path: "{path}/v" model_platform: "tensorflow" }} }}
"""


def row_of_user(name: bytes) -> Any:
    return VALUES["users"][USERS.index(name)]


def row_of_item(name: int) -> Any:
    return VALUES["items"][2 + ITEMS.index(name)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names")
    users, items = Vocabulary(USERS), Vocabulary(ITEMS, dtype="int64", oov_buckets=2)
    served = ServingConfig(
        features={
            "user": ServingFeature(table="users", input="id", vocabulary=users),
            "friends": ServingFeature(table="users", combiner="sum", vocabulary=users),
            "item": ServingFeature(table="items", input="id", vocabulary=items),
        }
    )
    write_checkpoint(folder / "ckpt", VALUES)
    for name, layout in (("m", "mmap"), ("v", "variables")):
        export_saved_model(folder / "ckpt", folder / name, serving_config=served, layout=layout)
    (folder / "models.config").write_text(CONFIG.format(path=folder))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    options = ("--grpc-port", "0", "--lookups", "native", "--metrics", "--verify-on-load", "--prewarm")
    with ServerProcess(None, folder / "log", "--config", str(folder / "models.config"), *options) as running:
        running.wait_for(1)
        while running.request("GET", "/v2/health/ready")[0] != 200:
            assert running.process.poll() is None, running.log
        yield running
    assert "Traceback" not in running.log


def value_of(name: bytes) -> Any:
    try:
        text = name.decode()
        return {"b64": base64.b64encode(name).decode()} if "x" in text else text
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(name).decode()}


def predict(server: ServerProcess, body: Any, model: str = "m", method: str = "predict") -> tuple[int, Any]:
    status, reply = server.request("POST", f"/v1/models/{model}:{method}", json.dumps(body))
    return status, json.loads(reply)


def row(user: bytes, friends: list[bytes], item: int) -> dict[str, Any]:
    return {"user": value_of(user), "friends": [value_of(one) for one in friends], "item": item}


def check(found: dict[str, Any], lines: list[tuple[bytes, list[bytes], int]]) -> None:
    users, friends, items = zip(*lines, strict=True)
    np.testing.assert_array_equal(np.float32(found["user"]), [row_of_user(one) for one in users])
    np.testing.assert_array_equal(np.float32(found["item"]), [row_of_item(one) for one in items])
    sums = [np.sum([row_of_user(one) for one in many if one] or [np.zeros(6)], 0) for many in friends]
    np.testing.assert_allclose(found["friends"], sums, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", ["m", "v"])
def test_rest_takes_text_base64_and_exact_integers(server: ServerProcess, model: str) -> None:
    lines = [(name, [name, b"user 1"], ITEMS[index % 5]) for index, name in enumerate(HOSTILE)]
    status, reply = predict(server, {"instances": [row(*line) for line in lines]}, model)
    assert status == 200, reply
    check({key: [one[key] for one in reply["predictions"]] for key in ("user", "friends", "item")}, lines)
    columns = [row(*line) for line in lines]
    body = {"inputs": {key: [one[key] for one in columns] for key in columns[0]}}
    status, reply = predict(server, body, model)
    assert status == 200, reply
    check(reply["outputs"], lines)


def test_an_unknown_name_has_a_sentence(server: ServerProcess) -> None:
    for name in (b"nobody", b"\xffno\0body", b"y" * (1 << 20), "Ünbekannt'\\".encode()):
        status, reply = predict(server, {"instances": [row(b"user 1", [], 1), row(name, [], 1)]})
        assert status == 400
        said(reply["error"])
        assert len(reply["error"]) < 300


def test_an_unknown_name_fails_its_request_alone(server: ServerProcess) -> None:
    """Many clients at once share runs; one of five sends a name that nobody has."""

    def ask(index: int) -> None:
        name, friends = f"user {index % 200}".encode(), [f"user {n}".encode() for n in range(index % 4)]
        if index % 5:
            status, reply = predict(server, {"instances": [row(name, friends, 100 + index % 50)]})
            assert status == 200, reply
            check({key: [value] for key, value in reply["predictions"][0].items()}, [(name, friends, 100 + index % 50)])
        else:
            status, reply = predict(server, {"instances": [row(b"nobody %d" % index, friends, 100)]})
            assert status == 400
            assert f"name 'nobody {index}' of row 0 is not in the vocabulary of table users" in reply["error"]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(400)))


@pytest.mark.parametrize("lookups", ["native", "auto", "tensorflow"])
@pytest.mark.sampled(1)
def test_integers_that_are_names_are_never_rows(tmp_path: Path, lookups: Any) -> None:
    """Names that are row numbers of other names: a lookup of rows would answer, and wrongly."""
    names = [*range(1, ROWS), 0]
    vocabulary = Vocabulary(names, dtype="int64")
    write_checkpoint(tmp_path / "ckpt", {"users": VALUES["users"]})
    features = {"x": ServingFeature(table="users", combiner="sum", vocabulary=vocabulary)}
    config = ServingConfig(features=features)
    version = export_saved_model(tmp_path / "ckpt", tmp_path / "m", serving_config=config, layout="mmap").path
    servable = runtime.load(version, options=runtime.RunOptions(lookups=lookups))
    try:
        signature = servable.signatures["serving_default"]
        assert servable.merging(signature) is not None
        assert signature.ids is not None
        assert signature.ids.error([np.full((1, 2), 10 * ROWS)]) is None
        ids = np.random.default_rng(0).integers(0, ROWS, (64, 40))  # as many as native lookups take
        (found,) = servable.run(signature, [ids])
        np.testing.assert_allclose(found, VALUES["users"][(ids - 1) % ROWS].sum(1), rtol=1e-4, atol=1e-4)
        (rows,) = servable.run(servable.signatures["packed"], [ids])
        np.testing.assert_allclose(rows, VALUES["users"][ids].sum(1), rtol=1e-4, atol=1e-4)
    finally:
        servable.close()
