"""REST predictions of TensorFlow Serving's API: the numbers are TensorFlow's, or numpy's for tables whose rows are known."""

import base64
import concurrent.futures
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.contract_serve import (
    LOOKUPS,
    TABLES,
    ZOO,
    Server,
    assert_near,
    draw_ids,
    look_up,
    run_tensorflow,
    saved_models,
    shared_server,
    zoo_inputs,
)

HALF = "half_plus_two"


@pytest.fixture(scope="module")
def models(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models(pytestconfig, tmp_path_factory)


@pytest.fixture(scope="module")
def server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return shared_server(pytestconfig, tmp_path_factory)


def predict(server: Server, target: str, body: Any, **headers: str) -> Any:
    """The JSON of an answer that has to be good."""
    reply = server.post(f"{target}:predict", body, **headers)
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "application/json"
    return reply.value


def assert_exact(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compare with TensorFlow's outputs, bit for bit. The alias of strings that are sent as base64 ends in _bytes."""
    assert sorted(found) == sorted(wanted)
    for alias, array in wanted.items():
        values = found[alias]
        if array.dtype == object:
            sent = [base64.b64decode(one["b64"]) if alias.endswith("_bytes") else one.encode() for one in values]
            assert sent == array.tolist()
        else:
            np.testing.assert_array_equal(np.array(values, array.dtype), array, strict=True)


def rows_of(inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    columns = {name: value.tolist() for name, value in inputs.items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize("signature", ZOO)
def test_answers_are_tensorflows(server: Server, models: Path, signature: str) -> None:
    """By rows and by columns, and without the name of an input that is the only one."""
    inputs = zoo_inputs(1)[signature]
    wanted = run_tensorflow(models / "zoo" / "3", signature, inputs)
    columns: Any = {name: value.tolist() for name, value in inputs.items()}
    rows: list[Any] = rows_of(inputs)
    for form in [columns, *columns.values()] if len(columns) == 1 else [columns]:
        answer = predict(server, "zoo", {"signature_name": signature, "inputs": form})
        assert list(answer) == ["outputs"]
        outputs = answer["outputs"]
        assert_exact(dict.fromkeys(wanted, outputs) if len(wanted) == 1 else outputs, wanted)
    for instances in [rows, [next(iter(row.values())) for row in rows]] if len(inputs) == 1 else [rows]:
        answer = predict(server, "zoo", {"signature_name": signature, "instances": instances})
        assert list(answer) == ["predictions"]
        predictions = answer["predictions"]
        if len(wanted) == 1:  # one output has no alias
            predictions = [{alias: row} for alias in wanted for row in predictions]
        assert_exact({alias: [row[alias] for row in predictions] for alias in wanted}, wanted)


@pytest.mark.parametrize("model", LOOKUPS)
def test_lookups_have_the_tables_rows(server: Server, model: str) -> None:
    for seed, (batch, width) in enumerate([(1, 1), (7, 4), (300, 20)]):
        inputs = draw_ids(seed, batch, width)
        columns = {name: value.tolist() for name, value in inputs.items()}
        found = predict(server, model, {"inputs": columns})["outputs"]
        assert_near(found, look_up(inputs))
        # A single id is a copy of a row, in which nothing is rounded.
        np.testing.assert_array_equal(np.array(found["user"], np.float32), TABLES["users"][inputs["user"]])


@pytest.mark.parametrize("model", LOOKUPS)
def test_lists_of_different_lengths_need_no_padding(server: Server, model: str) -> None:
    inputs = draw_ids(3, 6, 5)
    lengths = {name: (value != -1).sum(1) for name, value in inputs.items() if value.ndim == 2 and "_" not in name}
    lengths["rated_weights"] = lengths["rated"]
    ragged = {
        name: [row[:count] for row, count in zip(value.tolist(), lengths[name], strict=True)]
        if name in lengths
        else value.tolist()
        for name, value in inputs.items()
    }
    wanted = look_up(inputs)
    assert_near(predict(server, model, {"inputs": ragged})["outputs"], wanted)
    rows = [dict(zip(ragged, values, strict=True)) for values in zip(*ragged.values(), strict=True)]
    predictions = predict(server, model, {"instances": rows})["predictions"]
    assert_near({name: [row[name] for row in predictions] for name in wanted}, wanted)


def test_a_whole_model_has_tensorflows_values(server: Server, models: Path) -> None:
    random = np.random.default_rng(4)
    seen = np.where(np.arange(6) < random.integers(0, 7, (40, 1)), random.integers(0, 90, (40, 6)), -1)
    inputs = {"user": random.integers(0, 60, 40), "seen": seen, "price": random.random((40, 1), np.float32)}
    wanted = run_tensorflow(models / "ranker" / "1", "serving_default", inputs)["score"]
    rows = [{**row, "seen": [one for one in row["seen"] if one != -1]} for row in rows_of(inputs)]
    for instances in (rows_of(inputs), rows):
        found = np.array(predict(server, "ranker", {"instances": instances})["predictions"], np.float32)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_graph_of_tensorflow_1(server: Server) -> None:
    """Upstream's half_plus_two: y is x / 2 + 2."""
    assert predict(server, HALF, {"instances": [1.0, 2.0, 5.0]}) == {"predictions": [2.5, 3.0, 4.5]}
    assert predict(server, HALF, {"inputs": {"x": [[1.0], [2.0]]}}) == {"outputs": [[2.5], [3.0]]}
    assert predict(server, HALF, {"inputs": 4}) == {"outputs": 4.0}


def test_classify_and_regress(server: Server) -> None:
    body: dict[str, Any] = {"signature_name": "classify_x_to_y", "examples": [{"x": 2.0}, {"x": [80.0]}]}
    assert server.post(f"{HALF}:classify", body).value == {"results": [[["", 3.0]], [["", 42.0]]]}
    body = {"signature_name": "regress_x_to_y", "examples": [{"x": 2.0}, {"x": [80.0]}]}
    assert server.post(f"{HALF}:regress", body).value == {"results": [3.0, 42.0]}
    # A feature of the context is one of each example.
    body = {"signature_name": "regress_x_to_y2", "context": {"x": 80.0}, "examples": [{}, {"x2": 1.0}]}
    assert server.post(f"{HALF}:regress", body).value == {"results": [43.0, 43.0]}


def test_bytes_are_base64_both_ways(server: Server) -> None:
    values = [{"b64": base64.b64encode(text).decode()} for text in (b"a\0b\0\0", b"\xff\xfe", b"")]
    answer = predict(server, "zoo", {"signature_name": "first", "inputs": values})
    assert answer == {"outputs": values[0]}
    scalars = predict(server, "zoo", {"signature_name": "text", "inputs": values[0]})["outputs"]
    assert (scalars["raw_bytes"], scalars["length"]) == (values[0], 5)
    rows = predict(server, "zoo", {"signature_name": "text", "instances": [values[0], "hi"]})["predictions"]
    assert [row["length"] for row in rows] == [5, 2]
    assert [row["raw_bytes"] for row in rows] == [values[0], {"b64": "aGk="}]


def test_numbers_that_are_not_finite_are_bare_words(server: Server) -> None:
    reply = server.post("zoo:predict", '{"signature_name": "double", "instances": [NaN, Infinity, -Infinity]}')
    assert reply.status == 200
    np.testing.assert_array_equal(reply.value["predictions"], [np.nan, np.inf, -np.inf])
    assert b"null" not in reply.body
    reply = server.post(f"{HALF}:predict", '{"instances": [1e40, 3]}')  # infinite as a float
    np.testing.assert_array_equal(reply.value["predictions"], [np.inf, 3.5])


READ: Mapping[str, tuple[str, Any]] = {
    "the first of repeated keys": ('{"instances": [2], "instances": [4]}', {"predictions": [3.0]}),
    "the first of repeated inputs": ('{"inputs": {"x": [2], "x": [4]}}', {"outputs": [3.0]}),
    "the first of repeated names in a row": ('{"instances": [{"x": 2, "x": 4}]}', {"predictions": [3.0]}),
    "one document": ('{"instances": [2]} and more', {"predictions": [3.0]}),
    "keys that it knows": ('{"comment": {"instances": []}, "instances": [2]}', {"predictions": [3.0]}),
    "inputs that it knows": ('{"inputs": {"x": [2], "unknown": "ignored"}}', {"outputs": [3.0]}),
    "the default signature": ('{"signature_name": "", "instances": [2]}', {"predictions": [3.0]}),
    "its name": ('{"signature_name": "serving_default", "inputs": []}', {"outputs": []}),
    "an empty row": ('{"instances": [[]]}', {"predictions": [[]]}),
    "all forms of numbers": ('{"instances": [-0.0, 1e2, 1E-2]}', {"predictions": [2.0, 52.0, 2.005]}),
}


def test_a_body_is_read_as_tensorflow_serving_reads_it(server: Server) -> None:
    for what, (body, answer) in READ.items():
        assert predict(server, HALF, body) == answer, what


def test_the_graph_decides_about_ranks(server: Server) -> None:
    """The shape of the signature is not compared with the request's."""
    table = np.arange(15, dtype=np.float32).reshape(5, 3) / np.float32(7)
    assert predict(server, "zoo", {"signature_name": "total", "inputs": [1, 2.5]}) == {"outputs": 3.5}
    for ids in ([[[1], [2]]], 4, [3, 0]):
        found = predict(server, "zoo", {"inputs": ids})["outputs"]
        np.testing.assert_array_equal(np.array(found, np.float32), table[np.array(ids)])


def test_many_rows(server: Server) -> None:
    ids = np.random.default_rng(5).integers(0, 5, (40_000, 2))
    table = np.arange(15, dtype=np.float32).reshape(5, 3) / np.float32(7)
    for form, key in (("instances", "predictions"), ("inputs", "outputs")):
        found = predict(server, "zoo", {form: ids.tolist()})[key]
        np.testing.assert_array_equal(np.array(found, np.float32), table[ids])


@pytest.mark.parametrize("model", ["mapped", "zoo"])
def test_a_bad_id_fails_its_own_request_only(server: Server, model: str) -> None:
    """Sixteen clients at once, so that requests share runs. A fifth of the requests have an id outside of the table."""
    good = draw_ids(6, 1, 3)
    wanted = look_up(good)

    def ask(number: int) -> tuple[int, int]:
        is_bad = number % 5 == 0
        if model == "zoo":
            row = 5 + number % 7 if is_bad else number % 5
            reply = server.post("zoo:predict", {"instances": [[row, 0]]})
            text, value = f"indices[0,0] = {row} is not in [0, 5)", row * 3 / 7
        else:
            user = 60 + number % 7 if is_bad else int(good["user"][0])
            reply = server.post("mapped:predict", {"instances": rows_of(good | {"user": np.array([user])})})
            text, value = f"feature user: id {user} of row 0 is not in table users", wanted["user"][0, 0]
        if is_bad:
            assert text in reply.error
        else:
            answer = reply.value["predictions"][0]
            np.testing.assert_allclose(answer[0][0] if model == "zoo" else answer["user"][0], value, rtol=1e-6)
        return (reply.status, 400 if is_bad else 200)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(ask, range(250)))
    assert [found for found, _ in statuses] == [expected for _, expected in statuses]


def test_a_signature_of_serialized_examples(server: Server) -> None:
    """Exports have serving_examples, which takes tf.train.Example."""
    inputs = draw_ids(7, 3, 4)
    examples = []
    for row in rows_of(inputs):
        example = tf.train.Example()
        for name, value in row.items():
            values = value if isinstance(value, list) else [value]
            feature = example.features.feature[name]
            if name.endswith("_weights"):
                feature.float_list.value.extend(one for one in values if one)
            else:
                feature.int64_list.value.extend(one for one in values if one != -1)
        examples.append({"b64": base64.b64encode(example.SerializeToString()).decode()})
    found = predict(server, "mapped", {"signature_name": "serving_examples", "inputs": examples})["outputs"]
    assert_near(found, look_up(inputs))
