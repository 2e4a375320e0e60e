"""Requests to shards that fail, are slow, or lack a version: `ShardedPredictions` against shards of this process."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.serving.doubles import signature
from tpuembed_serving.core.servable import DegradedOutputs
from tpuembed_serving.core.shards_file import Shard, ShardsFile, SplitLookup
from tpuembed_serving.core.status import Code, StatusError, VersionGoneError
from tpuembed_serving.grpc import remote_calls
from tpuembed_serving.tf_serving.sharded import ShardedPredictions, _check_ids, _Route

Answer = Callable[[int, int], Any]
"""Of a shard: takes the number of the call, from 0, and the version. Returns its output, an error, or how many seconds it takes."""
ALL = signature({"a": "int64", "b": "int64"}, {"a": "float", "b": "float"})
SHAPES: dict[str, Mapping[str, tuple[int, ...]]] = {"a": {"a": (2,)}, "b": {"b": (3, 4)}}
NOT_FOUND, UNAVAILABLE = StatusError(Code.NOT_FOUND, "no such version"), StatusError(Code.UNAVAILABLE, "not reached")


def ok(name: str) -> Any:
    return np.ones((2, *SHAPES[name][name]), np.float32)


def run(
    monkeypatch: pytest.MonkeyPatch,
    answers: Mapping[str, Answer],
    *,
    zeros: str = "",
    versions: tuple[int, ...] = (1,),
    seconds: float = 10,
) -> list[Any]:
    """Return the outputs of two shards, a and b, for two rows on version 1."""
    counts = {name: itertools.count() for name in answers}

    class Calls:
        def __init__(self, address: str, _: Any) -> None:
            self.name = address

        async def run(self, _: str, version: int, __: Any, ___: Any, timeout: float) -> Any:
            found = answers[self.name](next(counts[self.name]), version)
            if isinstance(found, float):
                try:
                    async with asyncio.timeout(timeout):
                        await asyncio.sleep(found)
                except TimeoutError:
                    raise StatusError(Code.DEADLINE_EXCEEDED, "late") from None
                found = ok(self.name)
            if isinstance(found, StatusError):
                raise StatusError(found.code, found.message)
            return [found]

    monkeypatch.setattr(remote_calls, "RemotePredictions", Calls)
    file = ShardsFile(path=Path("f"), model="m", shards=tuple(Shard(name=name, address=name) for name in "ab"))
    routes = [
        _Route(number, signature({name: "int64"}, {name: "float"}), SHAPES[name] if name in zeros else None)
        for number, name in enumerate("ab")
    ]

    async def scenario() -> list[Any]:
        predictions = ShardedPredictions(file, [remote_calls.Access()] * 2, dict.fromkeys(versions, routes))
        return await predictions.run("m", 1, ALL, [np.arange(2), np.arange(2)], seconds)

    return asyncio.run(scenario())


def test_outputs_are_those_of_both_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, {"a": lambda *_: ok("a"), "b": lambda *_: ok("b")})
    assert not isinstance(found, DegradedOutputs)
    assert [array.shape for array in found] == [(2, 2), (2, 3, 4)]


@pytest.mark.parametrize("failure", [UNAVAILABLE, 60.0], ids=["not reached", "silent"])
def test_a_second_call_answers(monkeypatch: pytest.MonkeyPatch, failure: Any) -> None:
    answers = {"a": lambda call, _: failure if call == 0 else ok("a"), "b": lambda *_: ok("b")}
    found = run(monkeypatch, answers, seconds=1)
    np.testing.assert_array_equal(found[0], ok("a"))


@pytest.mark.parametrize("failure", [UNAVAILABLE, 60.0], ids=["not reached", "silent"])
def test_zeros_replace_a_shard_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, failure: Any) -> None:
    found = run(monkeypatch, {"a": lambda *_: ok("a"), "b": lambda *_: failure}, zeros="b", seconds=1)
    assert isinstance(found, DegradedOutputs)
    assert found.features == ("b",)
    np.testing.assert_array_equal(found[0], ok("a"))
    np.testing.assert_array_equal(found[1], np.zeros((2, 3, 4), np.float32))
    assert found[1].dtype == np.float32


@pytest.mark.parametrize(
    ("failure", "code"),
    [(UNAVAILABLE, Code.UNAVAILABLE), (60.0, Code.DEADLINE_EXCEEDED)],
    ids=["not reached", "silent"],
)
def test_a_shard_that_must_answer_fails_the_request(monkeypatch: pytest.MonkeyPatch, failure: Any, code: Code) -> None:
    with pytest.raises(StatusError, match="shard b: ") as caught:
        run(monkeypatch, {"a": lambda *_: ok("a"), "b": lambda *_: failure}, zeros="a", seconds=0.5)
    assert caught.value.code is code


def test_wrong_inputs_are_no_reason_for_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = StatusError(Code.INVALID_ARGUMENT, "id 9 is not in table t")
    with pytest.raises(StatusError, match="shard b: id 9") as caught:
        run(monkeypatch, {"a": lambda *_: ok("a"), "b": lambda *_: wrong}, zeros="ab")
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_a_replica_without_the_version_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, {"a": lambda call, _: NOT_FOUND if call < 5 else ok("a"), "b": lambda *_: ok("b")})
    np.testing.assert_array_equal(found[0], ok("a"))


@pytest.mark.parametrize(("versions", "other"), [((1,), None), ((1, 2), 2), ((2,), 2), ((), None)])
def test_a_version_that_is_gone_names_another(
    monkeypatch: pytest.MonkeyPatch, versions: tuple[int, ...], other: int | None
) -> None:
    with pytest.raises(VersionGoneError) as caught:
        run(monkeypatch, {"a": lambda *_: NOT_FOUND, "b": lambda *_: ok("b")}, zeros="a", versions=versions)
    assert caught.value.other == other


@pytest.mark.parametrize("shape", [(2, 1), (2, 3), (1, 2), (2,)])
def test_weights_of_a_split_feature_have_the_shape_of_its_ids(shape: tuple[int, ...]) -> None:
    feature = SplitLookup(table="t", rows=9, out_of_vocabulary="error", input="ids", drops_negative=True, weighted=True)
    named: dict[str, Any] = {"x": np.array([[1, -2], [3, 4]]), "x_weights": np.ones(shape, np.float32)}
    with pytest.raises(StatusError, match="Send one weight for each id") as caught:
        _check_ids("x", feature, named)
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_a_key_that_a_shard_refuses_is_no_fault_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = StatusError(Code.UNAUTHENTICATED, "no valid API key")
    with pytest.raises(StatusError, match="shard a: no valid API key") as caught:
        run(monkeypatch, {"a": lambda *_: refusal, "b": lambda *_: ok("b")})
    assert caught.value.code is Code.UNAVAILABLE
