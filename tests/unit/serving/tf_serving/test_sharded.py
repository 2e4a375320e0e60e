"""Requests to shards that fail, are slow, or lack a version: `ShardedPredictions` against shards of this process."""

import asyncio
import dataclasses
import itertools
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.serving.doubles import signature
from tpuembed_serving.core.api_keys import KEY_REFUSAL
from tpuembed_serving.core.servable import DegradedOutputs, State, VersionStatus
from tpuembed_serving.core.service import DEFAULT_SIGNATURE
from tpuembed_serving.core.shards_file import Shard, ShardsFile, SplitLookup
from tpuembed_serving.core.status import Code, StatusError, VersionGoneError
from tpuembed_serving.grpc import remote_calls
from tpuembed_serving.tf_serving import sharded
from tpuembed_serving.tf_serving.proxy import RemoteModels
from tpuembed_serving.tf_serving.sharded import Route, ShardedPredictions, ShardedStates
from tpuembed_serving.tf_serving.shards import Shards
from tpuembed_serving.tf_serving.split_ids import check_ids

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
    requests: int = 1,
) -> list[Any]:
    """Return the outputs of two shards, a and b, for two rows on version 1: those of the last of several requests."""
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
        Route(number, signature({name: "int64"}, {name: "float"}), SHAPES[name] if name in zeros else None)
        for number, name in enumerate("ab")
    ]

    async def scenario() -> list[Any]:
        predictions = ShardedPredictions(file, [remote_calls.Access()] * 2, dict.fromkeys(versions, routes), set())
        for _ in range(requests):
            found = await predictions.run("m", 1, ALL, [np.arange(2), np.arange(2)], seconds)
        return found

    return asyncio.run(scenario())


def test_a_request_for_another_export_than_the_routes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ALL", dataclasses.replace(ALL, shard_id="x"))
    with pytest.raises(VersionGoneError, match="version 1 is not on all shards any more"):
        run(monkeypatch, {"a": lambda *_: ok("a"), "b": lambda *_: ok("b")})


def test_a_replica_that_refuses_the_key_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = StatusError(Code.UNAUTHENTICATED, KEY_REFUSAL)
    answers: dict[str, Answer] = {"a": lambda *_: ok("a"), "b": lambda count, _: ok("b") if count % 2 else refusal}
    for found, name in zip(run(monkeypatch, answers, requests=3), "ab", strict=True):
        np.testing.assert_array_equal(found, ok(name))
    assert [record.message for record in caplog.records] == [
        "shard b: no valid API key. Set api_key_file in shards.yaml"
    ]


OTHER_SHARD = StatusError(Code.ABORTED, "version 1 of model b is the shard x here, and the request is for the shard y")


def test_a_replica_that_has_another_shard_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: dict[str, Answer] = {"a": lambda *_: ok("a"), "b": lambda count, _: ok("b") if count % 2 else OTHER_SHARD}
    for found, name in zip(run(monkeypatch, answers, requests=3), "ab", strict=True):
        np.testing.assert_array_equal(found, ok(name))
    (text,) = [record.message for record in caplog.records]
    assert text == f"shard b: {OTHER_SHARD.message}. Is it a server of this shard?"
    monkeypatch.setattr(sharded, "_OTHER_REPLICAS", 3)
    with pytest.raises(VersionGoneError, match="shard x here"):
        run(monkeypatch, {**answers, "b": lambda *_: OTHER_SHARD})


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


def test_zeros_of_many_requests_are_logged_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = {"a": lambda *_: ok("a"), "b": lambda *_: UNAVAILABLE}
    run(monkeypatch, answers, zeros="b", requests=5)
    first = "its features are zeros: shard b: not reached"
    assert [record.getMessage() for record in caplog.records] == [first]
    caplog.clear()
    monkeypatch.setattr(sharded, "_LOG_SECONDS", 0.0)
    run(monkeypatch, answers, zeros="b", requests=2)
    assert [record.getMessage() for record in caplog.records] == [first] * 2


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
        check_ids("x", feature, named)
    assert caught.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize(("takes", "shape"), [("id", ()), ("ids", ()), ("ids", (3,)), ("ids", (2, 2, 2))])
def test_ids_of_another_rank_are_refused(takes: str, shape: tuple[int, ...]) -> None:
    feature = SplitLookup(table="t", rows=9, out_of_vocabulary="error", input=takes)
    with pytest.raises(StatusError, match=r"input x has shape .* for each example") as caught:
        check_ids("x", feature, {"x": np.full(shape, 99)})
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_a_key_that_a_shard_refuses_is_no_fault_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = StatusError(Code.UNAUTHENTICATED, KEY_REFUSAL)
    with pytest.raises(StatusError, match=r"shard a: no valid API key\. Set api_key_file in shards") as caught:
        run(monkeypatch, {"a": lambda *_: refusal, "b": lambda *_: ok("b")})
    assert caught.value.code is Code.UNAVAILABLE


# ---- polls


class Polled:
    """The polls of two shards, a and b, whose answers a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, doubted: set[int] | None = None, **more: Any) -> None:
        self.answers: dict[str, list[int] | StatusError] = {}

        class States:
            def __init__(_, address: str, *__: Any) -> None:  # noqa: N805 - `self` is that of Polled
                pass

            def versions(_, model: str) -> list[VersionStatus]:  # noqa: N805
                found = self.answers[model]
                if isinstance(found, StatusError):
                    raise found
                return [VersionStatus(number, State.AVAILABLE, None) for number in reversed(found)]

            def definitions(_, *__: Any) -> Any:  # noqa: N805
                raise StatusError(Code.NOT_FOUND, "it has gone")

            def close(_) -> None:  # noqa: N805
                pass

        monkeypatch.setattr(remote_calls, "RemoteStates", States)
        shards = tuple(Shard(name=name, address=f"{name}:8500") for name in "ab")
        file = ShardsFile(path=Path("f"), model="shop", shards=shards, **more)
        self.missing = list[str]()
        self.states = ShardedStates(
            file, [remote_calls.Access()] * 2, {}, self.missing, set() if doubted is None else doubted
        )

    def fault(self, a: list[int] | StatusError, b: list[int] | StatusError) -> str:
        """Poll, and return the error."""
        self.answers = {"a": a, "b": b}
        with pytest.raises(StatusError) as caught:
            self.states.versions("shop")
        return caught.value.message

    def versions(self, a: list[int] | StatusError, b: list[int] | StatusError) -> list[tuple[int, State]]:
        """Poll, and return the versions and their states."""
        self.answers = {"a": a, "b": b}
        return [(one.version, one.state) for one in self.states.versions("shop")]


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    found = [(record.levelname, record.message) for record in caplog.records]
    caplog.clear()
    return found


NO_COMMON = "no version is on all shards: a has 2, 3; b has 1. Are their folders of one export?"


def test_shards_without_a_common_version_say_what_each_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    polled = Polled(monkeypatch)
    for _ in range(2):
        assert polled.fault([2, 3], [1]) == NO_COMMON
    assert logged(caplog) == [("WARNING", f"model shop: {NO_COMMON}")], "once"
    assert "b has 4." in polled.fault([2, 3], [4])
    assert len(logged(caplog)) == 1
    assert polled.versions([2, 3], [1, 2]) == [(3, State.START), (2, State.AVAILABLE), (1, State.START)]
    assert [one.error and one.error.message for one in polled.states.versions("shop")] == [
        "shard b does not have it",
        None,
        "shard a does not have it",
    ]
    polled.fault([2, 3], [4])
    assert len(logged(caplog)) == 1, "again"


def described(model: str, shard_id: str, *, is_tpuembed: bool = True) -> Any:
    """Return what `definitions` of a shard's server says of version 1."""
    found = dataclasses.replace(
        signature({model: "int64"}, {model: "float"}),
        name=DEFAULT_SIGNATURE,
        shard_id=shard_id,
        is_export_known=is_tpuembed or bool(shard_id),
    )
    dims = {"tensor_shape": {"dim": [{"size": "-1"}, {"size": "2"}]}}
    in_json = {"inputs": {model: dims}, "outputs": {model: dims}, "method_name": ""}
    return 1, ({DEFAULT_SIGNATURE: found}, {DEFAULT_SIGNATURE: in_json})


def test_a_version_whose_shard_is_another_now_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    doubted, ids = {1}, ["x-1", "x-2"]
    polled = Polled(monkeypatch, doubted=doubted)

    def definitions(states: Any, model: str, *_: Any) -> Any:
        return described(model, ids["ab".index(model)])

    monkeypatch.setattr(remote_calls.RemoteStates, "definitions", definitions)
    polled.answers = {"a": [1], "b": [1]}
    polled.states.definitions("shop", 1)
    assert polled.versions([1], [1]) == [(1, State.AVAILABLE)], "a doubt that was wrong"
    assert not doubted
    doubted.add(1)
    ids[1] = "y-2"
    assert polled.fault([1], [1]) == "version 1 is not on all shards any more. They are asked again"
    assert polled.versions([1], [1]) == [(1, State.AVAILABLE)]
    with pytest.raises(StatusError, match="of the export x, and that of shard b of the export y"):
        polled.states.definitions("shop", 1)
    ids[:] = ["y-2", "y-2"]
    with pytest.raises(StatusError, match="shards a and b: their servers have the same rows of the same tables"):
        polled.states.definitions("shop", 1)


@pytest.mark.parametrize("is_tpuembed", [True, False])
def test_a_shard_of_no_export_fits_to_none(
    is_tpuembed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TensorFlow Serving tells no export, so that nothing can be proven of it."""
    polled, ids = Polled(monkeypatch), ["x-1", ""]

    def definitions(states: Any, model: str, *_: Any) -> Any:
        return described(model, ids["ab".index(model)], is_tpuembed=is_tpuembed)

    monkeypatch.setattr(remote_calls.RemoteStates, "definitions", definitions)
    if is_tpuembed:
        with pytest.raises(StatusError, match="shard a is of the export x, and that of shard b of none"):
            polled.states.definitions("shop", 1)
    else:
        polled.states.definitions("shop", 1)
    ids[0] = ""
    for _ in range(2):
        polled.states.definitions("shop", 1)
    text = "model shop version 1: its shards are of no export for several servers. Nothing shows that they fit together"
    assert logged(caplog) == ([("WARNING", text)] if is_tpuembed else [])


def test_replicas_of_two_exports_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls go to the replicas in turn, and the first ones of a poll may come to those that do not fit together."""
    doubted = set[int]()
    polled = Polled(monkeypatch, doubted=doubted)
    ids = {"a": itertools.cycle(["y-1", "x-1"]), "b": itertools.cycle(["x-2"])}

    def definitions(states: Any, model: str, *_: Any) -> Any:
        return described(model, next(ids[model]))

    monkeypatch.setattr(remote_calls.RemoteStates, "definitions", definitions)
    _, (signatures, _) = polled.states.definitions("shop", 1)
    assert signatures[DEFAULT_SIGNATURE].export_id == "x"
    for _ in range(3):
        doubted.add(1)
        assert polled.versions([1], [1]) == [(1, State.AVAILABLE)], "a replica still has it"
    ids["a"] = itertools.cycle(["y-1", "z-1"])
    with pytest.raises(StatusError, match="of the export"):
        polled.states.definitions("shop", 1)


def test_requests_and_the_status_say_why_no_version_is_available(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    polled = Polled(monkeypatch)
    polled.answers = {"a": [2, 3], "b": [1]}
    shards = Shards(ShardsFile(path=Path("f"), model="shop", shards=()))
    monkeypatch.setattr(shards, "states", lambda: polled.states)
    models = RemoteModels(["shop"], shards, 0.01)
    models.start()
    models.wait_for_first_poll(lambda: False)
    with pytest.raises(StatusError, match="a has 2, 3; b has 1") as caught, models.lease("shop", None):
        pass
    assert caught.value.code is Code.UNAVAILABLE
    with pytest.raises(StatusError, match="a has 2, 3; b has 1"):
        models.statuses("shop")
    models.stop()
    assert logged(caplog) == [("WARNING", f"model shop: {NO_COMMON}")]


def test_a_shard_is_logged_when_it_stops_to_answer_and_when_it_answers_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    polled = Polled(monkeypatch)
    for _ in range(3):
        polled.fault([1], UNAVAILABLE)
        assert polled.missing == ["b"]
    assert logged(caplog) == [("INFO", "waiting: shard b: not reached")], "a server that starts is no warning"
    assert polled.versions([1], [1]) == [(1, State.AVAILABLE)]
    assert logged(caplog) == [("INFO", "shard b: answers")]
    for number in range(3):
        late = StatusError(Code.UNAVAILABLE, f"not reached, the time number {number}")
        assert polled.versions([1], late) == [(1, State.AVAILABLE)]
        assert polled.missing == ["b"]
    assert logged(caplog) == [("WARNING", "shard b: not reached, the time number 0")]
    polled.versions([1], [1])
    assert logged(caplog) == [("INFO", "shard b: answers again")]


def test_a_shard_is_not_missing_while_one_of_its_replicas_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls go to the replicas in turn, so that each second poll came to one that was still loading."""
    polled, asked = Polled(monkeypatch), list[str]()
    polled.versions([1], [1])
    loading = StatusError(Code.UNAVAILABLE, "the server is loading")

    def versions(_: Any, model: str) -> list[VersionStatus]:
        asked.append(model)
        if model == "b" and asked.count("b") % 2:
            raise loading
        return [VersionStatus(1, State.AVAILABLE, None)]

    monkeypatch.setattr(remote_calls.RemoteStates, "versions", versions)
    for _ in range(3):
        assert [one.state for one in polled.states.versions("shop")] == [State.AVAILABLE]
        assert not polled.missing
    assert not logged(caplog)


def test_a_shard_that_does_not_answer_in_time_is_named_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    late = StatusError(Code.DEADLINE_EXCEEDED, "Deadline Exceeded")
    assert Polled(monkeypatch).fault([1], late) == "shard b: has not answered within 5 seconds at b:8500"


def test_what_does_not_mend_itself_is_a_warning_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    polled = Polled(monkeypatch)
    for _ in range(2):
        polled.fault([1], StatusError(Code.UNAUTHENTICATED, "no valid API key"))
    assert logged(caplog) == [("WARNING", "shard b: no valid API key. Set api_key_file in shards.yaml")]


def test_a_shard_that_never_answers_is_a_warning_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)  # other tests may have left another one
    polled = Polled(monkeypatch)
    polled.fault([1], UNAVAILABLE)
    monkeypatch.setattr(sharded, "_STARTING_SECONDS", 0.0)
    for _ in range(2):
        polled.fault([1], UNAVAILABLE)
    assert logged(caplog) == [("WARNING", "shard b: not reached")]


@pytest.mark.parametrize(
    ("refusal", "more", "message"),
    [
        (StatusError(Code.UNAUTHENTICATED, KEY_REFUSAL), {}, "no valid API key. Set api_key_file in shards.yaml"),
        (
            StatusError(Code.UNAUTHENTICATED, KEY_REFUSAL),
            {"api_key_file": Path("k")},
            "no valid API key. Correct api_key_file in shards.yaml",
        ),
        (
            StatusError(Code.NOT_FOUND, "Could not find any versions of model b"),
            {},
            "the server at b:8500: Could not find any versions of model b. It may be another shard's server, or still loading",
        ),
    ],
    ids=["no key", "another key", "another shard"],
)
def test_an_error_of_a_poll_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, refusal: StatusError, more: dict[str, Any], message: str
) -> None:
    assert Polled(monkeypatch, **more).fault([1], refusal) == f"shard b: {message}"


def test_a_shard_that_refuses_connections_is_named_by_its_address() -> None:
    file = ShardsFile(path=Path("f"), model="shop", shards=(Shard(name="a", address="127.0.0.1:1"),))
    states = Shards(file).states()
    with pytest.raises(StatusError) as caught:
        states.versions("shop")
    states.close()
    assert caught.value.message.startswith("shard a: the server at 127.0.0.1:1 is unavailable: ")
    assert caught.value.message.endswith(". Is it the gRPC port? Do the shards use TLS (tls in shards.yaml)?")

    async def ask() -> str:
        predictions = Shards(file).predictions()
        predictions._routes = {1: [Route(0, ALL, None)]}
        with pytest.raises(StatusError) as caught:
            await predictions.run("m", 1, ALL, [np.arange(2), np.arange(2)], 5)
        predictions.close()
        return caught.value.message

    message = asyncio.run(ask())
    assert message.startswith("shard a: the server at 127.0.0.1:1 is unavailable: ")
    assert "TLS" not in message, "each request would have it"
