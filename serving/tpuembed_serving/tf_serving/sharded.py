"""Answers requests by several servers, each of which looks up some of the features.

A shard is a model of TensorFlow Serving's API, on one server or on replicas behind one address. All shards have the same
versions. A request runs on one version of all of them, and its outputs are those of all shards together.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tpuembed_serving.core.log_once import ONCE
from tpuembed_serving.core.servable import Array, Signature, State, VersionStatus
from tpuembed_serving.core.service import DEFAULT_SIGNATURE
from tpuembed_serving.core.shards_file import ShardsFile
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.tensorflow.import_lock import IMPORTING_TENSORFLOW
from tpuembed_serving.tf_serving.redis_shard import RedisPredictions, RedisStates

__all__ = ["Shards"]

logger = logging.getLogger(__name__)

_POLL_TIMEOUT_SECONDS: Final = 5.0
_HEDGE_SHARE: Final = 0.3
"""A shard that has not answered after this share of the request's time is asked a second time."""
_OTHER_REPLICAS: Final = 20
"""How often another replica is asked for a version that one does not have yet, or no longer."""
_BETWEEN_SECONDS: Final = 0.01
_ROUND_ROBIN: Final = ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}')


@dataclasses.dataclass(frozen=True)
class _Route:
    """What one shard answers of a signature."""

    shard: int
    signature: Signature


class ShardedStates:
    """The versions and signatures of all shards together; see StatusSource. One thread calls its methods."""

    def __init__(self, file: ShardsFile, routes: dict[int, list[_Route]]) -> None:
        """Open a channel to each shard. `routes` gets what each shard answers of `serving_default`, by version."""
        with IMPORTING_TENSORFLOW:
            from tpuembed_serving.grpc.remote_calls import RemoteStates

        self._file = file
        self._states = [
            RedisStates(shard.url) if shard.url else RemoteStates(shard.address, _POLL_TIMEOUT_SECONDS, [_ROUND_ROBIN])
            for shard in file.shards
        ]
        self._known: list[list[VersionStatus] | None] = [None] * len(file.shards)
        self._routes = routes

    def versions(self, model: str) -> list[VersionStatus]:  # noqa: ARG002 - there is one
        """Return every version, newest first. One is available if it is on all shards.

        A shard that does not answer is taken to have the versions that it had. Its requests fail by themselves.

        Raises:
            StatusError: UNAVAILABLE, a shard has not answered yet.
        """
        for number, (shard, states) in enumerate(zip(self._file.shards, self._states, strict=True)):
            try:
                self._known[number] = states.versions(shard.name)
            except StatusError as error:
                if self._known[number] is None:
                    raise StatusError(error.code, f"shard {shard.name}: {error.message}") from None
                logger.warning("shard %s: %s", shard.name, error.message, extra=ONCE)
        by_shard = [{status.version: status for status in known or ()} for known in self._known]
        found = []
        for version in sorted({version for each in by_shard for version in each}, reverse=True):
            statuses = [each.get(version) for each in by_shard]
            worst = min(status.state if status is not None else State.START for status in statuses)
            if any(status is not None and status.state > State.AVAILABLE for status in statuses):
                worst = State.END
            fault = next((status.error for status in statuses if status is not None and status.error), None)
            found.append(VersionStatus(version, worst, fault))
        for version in self._routes.keys() - {status.version for status in found}:
            del self._routes[version]
        return found

    def definitions(self, model: str, version: int | None, label: str = "") -> tuple[int, Any]:  # noqa: ARG002
        """Return the number and the signature `serving_default` of a version: the inputs and outputs of all shards.

        Raises:
            StatusError: a shard has no such version or no such signature, two have one input, or the label names several versions.
        """
        routes, numbers, in_json = [], [], {"inputs": {}, "outputs": {}, "method_name": ""}
        for number, (shard, states) in enumerate(zip(self._file.shards, self._states, strict=True)):
            found, (signatures, definitions) = states.definitions(shard.name, version, label)
            if DEFAULT_SIGNATURE not in signatures:
                raise StatusError(Code.NOT_FOUND, f"shard {shard.name}: version {found} has no {DEFAULT_SIGNATURE}")
            numbers.append(found)
            routes.append(_Route(number, signatures[DEFAULT_SIGNATURE]))
            definition = definitions[DEFAULT_SIGNATURE]
            for side in ("inputs", "outputs"):
                if both := sorted(in_json[side].keys() & definition[side].keys()):  # type: ignore[attr-defined]
                    text = f"shard {shard.name}: {both[0]!r} is among the {side} of another shard too"
                    raise StatusError(Code.FAILED_PRECONDITION, text)
                in_json[side].update(definition[side])  # type: ignore[attr-defined]
            in_json["method_name"] = definition["method_name"]
        if len(set(numbers)) > 1:
            text = f"label {label!r} is version {min(numbers)} of one shard and {max(numbers)} of another"
            raise StatusError(Code.INVALID_ARGUMENT, text)
        self._routes[numbers[0]] = routes
        return numbers[0], ({DEFAULT_SIGNATURE: self._merged(routes)}, {DEFAULT_SIGNATURE: in_json})

    def _merged(self, routes: Sequence[_Route]) -> Signature:
        inputs = sorted((info for route in routes for info in route.signature.inputs), key=lambda info: info.alias)
        outputs = sorted((info for route in routes for info in route.signature.outputs), key=lambda info: info.alias)
        padding = tuple(self._file.padding.get(info.alias) for info in inputs)
        return Signature(
            DEFAULT_SIGNATURE,
            tuple(inputs),
            tuple(outputs),
            padding=padding if any(value is not None for value in padding) else (),
            row_bytes=sum(route.signature.row_bytes for route in routes),
        )

    def close(self) -> None:
        """Close the channels."""
        for states in self._states:
            states.close()


class ShardedPredictions:
    """Runs requests on all shards; see Predictions. One event loop calls its methods."""

    def __init__(self, file: ShardsFile, routes: Mapping[int, Sequence[_Route]]) -> None:
        """Open a channel to each shard. `routes` are those of ShardedStates."""
        from tpuembed_serving.grpc.remote_calls import RemotePredictions

        self._file, self._routes = file, routes
        self._predictions = [
            RedisPredictions(shard.url) if shard.url else RemotePredictions(shard.address, [_ROUND_ROBIN])
            for shard in file.shards
        ]

    async def run(
        self,
        model: str,  # noqa: ARG002 - there is one
        version: int,
        signature: Signature,
        inputs: Sequence[Array],
        timeout_seconds: float,
    ) -> list[Array]:
        """Return the outputs of all shards for `inputs`, all of one version.

        A shard that cannot be reached, or has not answered after 30% of the time, is asked a second time. The first answer counts.
        If a replica does not have the version, others are asked.

        Raises:
            StatusError: that of the first shard that cannot answer; its message names it.
        """
        named = {info.alias: array for info, array in zip(signature.inputs, inputs, strict=True)}
        if len({len(array) for array in inputs if array.ndim}) > 1:
            sizes = {name: len(array) for name, array in named.items() if array.ndim}
            least, most = min(sizes, key=lambda name: sizes[name]), max(sizes, key=lambda name: sizes[name])
            text = f"input {least} has {sizes[least]} rows, but input {most} has {sizes[most]}. Send as many"
            raise StatusError(Code.INVALID_ARGUMENT, text)
        routes = self._routes.get(version)
        if routes is None:
            raise StatusError(Code.UNAVAILABLE, f"version {version} is on no shard any more. Send the request again")
        calls = [asyncio.ensure_future(self._ask(route, version, named, timeout_seconds)) for route in routes]
        try:
            answers = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        found = {name: array for answer in answers for name, array in answer.items()}
        return [found[info.alias] for info in signature.outputs]

    async def _ask(
        self, route: _Route, version: int, named: Mapping[str, Array], timeout_seconds: float
    ) -> dict[str, Array]:
        shard, predictions = self._file.shards[route.shard], self._predictions[route.shard]
        inputs = [named[info.alias] for info in route.signature.inputs]

        def call(seconds: float) -> "asyncio.Future[list[Array]]":
            return asyncio.ensure_future(predictions.run(shard.name, version, route.signature, inputs, seconds))

        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_seconds
        running, has_hedged, others = {call(timeout_seconds)}, False, 0
        error = StatusError(Code.UNAVAILABLE, "no answer")
        try:
            while running:
                wait = None if has_hedged else _HEDGE_SHARE * timeout_seconds
                done, running = await asyncio.wait(running, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    failed = each.exception()
                    if failed is None:
                        return {
                            info.alias: value
                            for info, value in zip(route.signature.outputs, each.result(), strict=True)
                        }
                    if not isinstance(failed, StatusError):
                        raise failed
                    error = failed
                    if failed.code is Code.NOT_FOUND and others < _OTHER_REPLICAS:
                        others += 1
                        await asyncio.sleep(_BETWEEN_SECONDS)
                        running = {*running, call(max(0.001, ends - loop.time()))}
                    elif failed.code not in (Code.NOT_FOUND, Code.UNAVAILABLE):
                        raise StatusError(failed.code, f"shard {shard.name}: {failed.message}")
                is_late = not done or error.code is Code.UNAVAILABLE
                if is_late and not has_hedged:
                    has_hedged = True
                    running = {*running, call(max(0.001, ends - loop.time()))}
        finally:
            for each in running:
                each.cancel()
        code = Code.UNAVAILABLE if error.code is Code.NOT_FOUND else error.code
        raise StatusError(code, f"shard {shard.name}: {error.message}")

    def close(self) -> None:
        """Start to close the channels."""
        for predictions in self._predictions:
            predictions.close()


class Shards:
    """All shards of a file as one server."""

    def __init__(self, file: ShardsFile) -> None:
        """Open nothing yet."""
        self._file, self._routes = file, dict[int, list[_Route]]()

    def states(self, _: str) -> ShardedStates:
        """Connect for queries of versions."""
        return ShardedStates(self._file, self._routes)

    def predictions(self, _: str) -> ShardedPredictions:
        """Connect for requests, on the event loop that is running."""
        return ShardedPredictions(self._file, self._routes)
