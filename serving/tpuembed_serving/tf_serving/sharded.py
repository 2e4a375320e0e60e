"""Answers requests by several servers, each of which looks up some of the features.

A shard is a model of TensorFlow Serving's API, on one server or on replicas behind one address. All shards have the same
versions. A request runs on one version of all of them, and its outputs are those of all shards together.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tpuembed_serving.core.log_once import ONCE
from tpuembed_serving.core.servable import Array, DegradedOutputs, Signature, State, TensorInfo, VersionStatus
from tpuembed_serving.core.service import DEFAULT_SIGNATURE
from tpuembed_serving.core.shards_file import Shard, ShardsFile
from tpuembed_serving.core.status import Code, ReportedError, StatusError, VersionGoneError
from tpuembed_serving.tensorflow.import_lock import IMPORTING_TENSORFLOW
from tpuembed_serving.tf_serving.redis_shard import RedisPredictions, RedisStates
from tpuembed_serving.tf_serving.split_ids import check_ids

if TYPE_CHECKING:
    from tpuembed_serving.grpc.remote_calls import Access

__all__ = ["Route", "ShardedPredictions", "ShardedStates"]

logger = logging.getLogger(__name__)

_POLL_TIMEOUT_SECONDS: Final = 5.0
_STARTING_SECONDS: Final = 60.0
"""A shard that has not answered for so long after the start is a warning."""
_WHILE_STARTING: Final = (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.NOT_FOUND)
"""What a server that starts answers. All else, such as a wrong key, does not mend itself, and is a warning at once."""
_SHOWN: Final = 8
"""The most shards, and versions of one, in a message."""
_HEDGE_SHARE: Final = 0.3
"""A shard that has not answered after this share of the request's time is asked a second time."""
_ZEROS_SHARE: Final = 0.8
"""A shard whose features may be zeros has this share of the request's time."""
_OTHER_REPLICAS: Final = 20
"""How often another replica is asked for a version that one does not have yet, or no longer."""
_REPLICAS: Final = 8
"""How often the replicas of a shard are asked what they have, if they do not fit together. Calls go to them in turn."""
_POLLED_REPLICAS: Final = 4
"""How often a poll asks a shard before it counts as missing."""
_BETWEEN_SECONDS: Final = 0.01
_ELSEWHERE: Final = (Code.NOT_FOUND, Code.ABORTED)
"""A replica does not have the version, or has another shard by this number: another replica may have it."""
_REFUSALS: Final = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)
"""A replica takes no such key. Another one may."""
_LOG_SECONDS: Final = 10.0
"""How long after a warning that a request makes about a shard there are no further ones. Zeros are counted in the metrics."""
_OLD_CALLS_SECONDS: Final = 60.0
"""How long calls may take that were made before the certificates or the key were replaced."""


@dataclasses.dataclass(frozen=True)
class Route:
    """What one shard answers of a signature.

    Attributes:
        shapes: of an example's outputs, if zeros may take their place; None otherwise.
    """

    shard: int
    signature: Signature
    shapes: Mapping[str, tuple[int, ...]] | None


class ShardClients:
    """What calls each shard. The clients of servers are made anew once the certificates or the key have changed.

    Attributes:
        each: the clients, in the order of the shards.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        accesses: Sequence["Access"],
        of_redis: Callable[[str], Any],
        of_server: Callable[[str, "Access"], Any],
        end: Callable[[Any], None],
    ) -> None:
        """Make the clients: of the URL of a Redis, or of a server's address and access. `end` closes one that is replaced."""
        self._shards, self._of_server, self._end = shards, of_server, end
        self.each: list[Any] = [of_redis(shard.url) if shard.url else None for shard in shards]
        self._accesses: Sequence[Access] | None = accesses
        self.update()

    def renew(self, accesses: Sequence["Access"]) -> None:
        """Call the servers by `accesses` from the next `update` on. Any thread may call this."""
        self._accesses = accesses

    def update(self) -> None:
        """Replace the clients of servers, if `renew` was called. The thread that uses them calls this."""
        accesses, self._accesses = self._accesses, None
        for number, access in enumerate(accesses or ()):
            if address := self._shards[number].address:
                before, self.each[number] = self.each[number], self._of_server(address, access)
                if before is not None:
                    self._end(before)


class ShardedStates:
    """The versions and signatures of all shards together; see StatusSource. One thread calls its methods."""

    def __init__(
        self,
        file: ShardsFile,
        accesses: Sequence["Access"],
        routes: dict[int, list[Route]],
        missing: list[str],
        doubted: set[int],
    ) -> None:
        """Open a channel to each shard.

        Args:
            file, accesses: the shards, and how each is called.
            routes: gets what each shard answers of `serving_default`, by version.
            missing: gets the shards that a poll did not reach.
            doubted: has the versions that a server had another shard of, since the last poll.
        """
        with IMPORTING_TENSORFLOW:
            from tpuembed_serving.grpc.remote_calls import RemoteStates

        self._file, self._routes, self._missing = file, routes, missing
        self.clients = ShardClients(
            file.shards,
            accesses,
            lambda url: RedisStates(url, file.redis_password_file),
            lambda address, access: RemoteStates(address, _POLL_TIMEOUT_SECONDS, access),
            lambda states: states.close(),
        )
        self._states = self.clients.each
        self._known: list[list[VersionStatus] | None] = [None] * len(file.shards)
        self._of_several = {*file.split, *(f"{name}_weights" for name, one in file.split.items() if one.weighted)}
        self._threads = concurrent.futures.ThreadPoolExecutor(min(16, len(file.shards)), "poll-shards")
        self._started, self._mismatch = time.monotonic(), ""
        self._logged = dict[str, tuple[int, Code]]()
        self._doubted = doubted

    def versions(self, model: str) -> list[VersionStatus]:  # noqa: ARG002 - there is one
        """Return every version, newest first. One is available if it is on all shards.

        A shard that does not answer is taken to have the versions that it had. Its requests fail by themselves.

        Raises:
            ReportedError: a shard has not answered yet, or no version is on all shards.
        """
        self.clients.update()
        faults = {}
        for number, found in enumerate(self._threads.map(self._poll, range(len(self._states)))):
            shard, is_new = self._file.shards[number], self._known[number] is None
            if isinstance(found, StatusError):
                faults[shard.name] = self._fault(shard, found)
                is_new = is_new and found.code in _WHILE_STARTING
            else:
                self._known[number] = found
            self._log(shard.name, faults.get(shard.name), is_new=is_new)
        self._missing[:] = faults
        for shard, known in zip(self._file.shards, self._known, strict=True):
            if known is None:
                raise faults[shard.name]
        by_shard = [{status.version: status for status in known or ()} for known in self._known]
        found = []
        for version in sorted({version for each in by_shard for version in each}, reverse=True):
            statuses = [each.get(version) for each in by_shard]
            worst = min(status.state if status is not None else State.START for status in statuses)
            if any(status is not None and status.state > State.AVAILABLE for status in statuses):
                worst = State.END
            fault = next((status.error for status in statuses if status is not None and status.error), None)
            if fault is None and worst is State.START and None in statuses:
                fault = StatusError(
                    Code.UNAVAILABLE, f"shard {self._file.shards[statuses.index(None)].name} does not have it"
                )
            found.append(VersionStatus(version, worst, fault))
        doubts = [self._doubted.pop() for _ in range(len(self._doubted))]
        changed = {version for version in doubts if self._has_changed(version)}
        # A version whose shards are others now is given up for one poll, so that its signature is read again.
        found = [VersionStatus(one.version, State.END, None) if one.version in changed else one for one in found]
        available = {status.version for status in found if status.state is State.AVAILABLE}
        gone = self._routes.keys() - available
        for version in gone:
            del self._routes[version]
        self._check_common(by_shard)
        if gone and not available:
            raise ReportedError(
                Code.UNAVAILABLE, f"version {max(gone)} is not on all shards any more. They are asked again"
            )
        return found

    def _has_changed(self, version: int) -> bool:
        """Return True if no replica of a shard has the shard that it had when the version became available, but another one."""
        for route in self._routes.get(version, ()):
            ids = set()
            for _ in range(_REPLICAS):
                with contextlib.suppress(StatusError):
                    _, (signatures, _) = self._states[route.shard].definitions(
                        self._file.shards[route.shard].name, version
                    )
                    ids.add(signatures[DEFAULT_SIGNATURE].shard_id if DEFAULT_SIGNATURE in signatures else "")
                if route.signature.shard_id in ids:
                    break
            if ids and route.signature.shard_id not in ids:
                return True
        return False

    def _of_one_export(
        self, version: int | None, label: str, first: Sequence[tuple[int, Any]]
    ) -> Sequence[tuple[int, Any]]:
        """Return the definitions of all shards, of one export if there is one that a replica of each shard has.

        Calls go to the replicas in turn, so that further ones come to the others.

        Args:
            version, label: as of `definitions`.
            first: the answer of each shard's first call.
        """
        by_export: list[dict[str, tuple[int, Any]]] = [{_export_id(one): one} for one in first]
        common = _common(by_export)
        for _ in range(_REPLICAS - 1):
            if common is None or common:
                break
            for shard, states, each in zip(self._file.shards, self._states, by_export, strict=True):
                with contextlib.suppress(StatusError):
                    one = states.definitions(shard.name, version, label)
                    each.setdefault(_export_id(one), one)
            common = _common(by_export)
        if not common:
            return first
        chosen = next((export_id for export_id in map(_export_id, first) if export_id in common), min(common))
        return [each.get(chosen, one) for each, one in zip(by_export, first, strict=True)]

    def _fault(self, shard: Shard, error: StatusError) -> ReportedError:
        """Return the error of a poll with the shard's name, and what to do."""
        text = _text(error, self._file)
        if error.code is Code.NOT_FOUND and shard.address:
            text = f"the server at {shard.address}: {text}. It may be another shard's server, or still loading"
        code = Code.UNAVAILABLE if error.code is Code.NOT_FOUND else _code(error)
        return ReportedError(code, f"shard {shard.name}: {text}")

    def _log(self, name: str, fault: StatusError | None, *, is_new: bool) -> None:
        """Log that a shard stops to answer, or answers again. While servers start, a shard that does not answer is no warning."""
        before = self._logged.get(name)
        if fault is None:
            if before is not None:
                del self._logged[name]
                logger.info("shard %s: answers%s", name, "" if is_new else " again", extra=ONCE)
            return
        is_starting = is_new and time.monotonic() < self._started + _STARTING_SECONDS
        now = self._logged[name] = (logging.INFO if is_starting else logging.WARNING), fault.code
        if now != before:
            logger.log(now[0], "%s%s", "waiting: " if is_starting else "", fault.message, extra=ONCE)

    def _check_common(self, by_shard: Sequence[Mapping[int, VersionStatus]]) -> None:
        """Raise ReportedError if each shard has versions, but none is on all shards."""
        has = [{number for number, one in each.items() if one.state <= State.AVAILABLE} for each in by_shard]
        before, self._mismatch = self._mismatch, ""
        if not all(has) or set.intersection(*has):
            return
        parts = [
            f"{shard.name} has {', '.join(map(str, sorted(numbers)[-_SHOWN:]))}"
            for shard, numbers in zip(self._file.shards, has, strict=True)
        ]
        shown = "; ".join(parts[:_SHOWN]) + (f"; and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else "")
        self._mismatch = f"no version is on all shards: {shown}. Are their folders of one export?"
        if self._mismatch != before:
            logger.warning("model %s: %s", self._file.model, self._mismatch, extra=ONCE)
        raise ReportedError(Code.UNAVAILABLE, self._mismatch)

    def _poll(self, number: int) -> list[VersionStatus] | StatusError:
        """Ask a shard. If a replica answers an error, such as one that still loads, others are asked."""
        shard = self._file.shards[number]
        for _ in range(_POLLED_REPLICAS if shard.address else 1):
            try:
                return self._states[number].versions(shard.name)
            except StatusError as error:
                fault = error
            if fault.code is Code.DEADLINE_EXCEEDED:
                text = f"has not answered within {_POLL_TIMEOUT_SECONDS:g} seconds at {shard.address or shard.url}"
                return StatusError(fault.code, text)
        return fault

    def definitions(self, model: str, version: int | None, label: str = "") -> tuple[int, Any]:  # noqa: ARG002
        """Return the number and the signature `serving_default` of a version: the inputs and outputs of all shards.

        Raises:
            StatusError: a shard has no such version or no such signature, two have one input, or the label names several versions.
        """
        routes, numbers, file, told = [], [], self._file, list[tuple[int, Any]]()
        in_json: dict[str, dict[str, Any]] = {"inputs": {}, "outputs": {}}
        method, exports, parts = "", dict[str, str](), dict[str, str]()
        for shard, states in zip(self._file.shards, self._states, strict=True):
            try:
                told.append(states.definitions(shard.name, version, label))
            except StatusError as error:
                raise StatusError(_code(error), f"shard {shard.name}: {error.message}") from None
        told = [*self._of_one_export(version, label, told)]
        for number, (shard, (found, (signatures, definitions))) in enumerate(zip(file.shards, told, strict=True)):
            if DEFAULT_SIGNATURE not in signatures:
                raise StatusError(Code.NOT_FOUND, f"shard {shard.name}: version {found} has no {DEFAULT_SIGNATURE}")
            numbers.append(found)
            definition = definitions[DEFAULT_SIGNATURE]
            if shard.features and set(shard.features) != definition["outputs"].keys():
                answers, listed = (", ".join(sorted(names)) for names in (definition["outputs"], shard.features))
                text = f"shard {shard.name}: the server at {shard.address} answers {answers}, and {file.path} lists {listed}"
                raise StatusError(Code.FAILED_PRECONDITION, f"{text}. It may be another shard's server")
            signature = signatures[DEFAULT_SIGNATURE]
            if signature.shard_id:
                exports.setdefault(signature.export_id, shard.name)
                if (other := parts.setdefault(signature.shard_id, shard.name)) != shard.name:
                    text = f"shards {other} and {shard.name}: their servers have the same rows of the same tables"
                    raise StatusError(
                        Code.FAILED_PRECONDITION, f"{text}. Give each shard the address of its own servers"
                    )
            routes.append(Route(number, signature, self._zeros(shard.name, definition["outputs"])))
            for side in ("inputs", "outputs"):
                both = sorted((in_json[side].keys() & definition[side].keys()) - self._of_several)
                if both:
                    text = f"shard {shard.name}: {both[0]!r} is among the {side} of another shard too"
                    raise StatusError(Code.FAILED_PRECONDITION, text)
                in_json[side].update(definition[side])
            method = definition["method_name"]
        if unknown := sorted(file.zeros - in_json["outputs"].keys()):
            text = f"shards {file.path}: on_failure names {unknown[0]!r}, which is no output of a shard"
            raise StatusError(Code.FAILED_PRECONDITION, text)
        if len(set(numbers)) > 1:
            text = f"label {label!r} is version {min(numbers)} of one shard and {max(numbers)} of another"
            raise StatusError(Code.INVALID_ARGUMENT, text)
        if len(exports) > 1:
            (first, one), (second, other) = list(exports.items())[:2]
            text = f"version {numbers[0]} of shard {one} is of the export {first}, and that of shard {other} of the export {second}"
            raise StatusError(
                Code.FAILED_PRECONDITION, f"{text}. Give the addresses of one export, or copy its versions again"
            )
        of_none = [
            shard.name for shard, route in zip(file.shards, routes, strict=True) if route.signature.is_of_no_export
        ]
        if exports and of_none:
            one, other = next(iter(exports.items()))
            text = (
                f"version {numbers[0]} of shard {other} is of the export {one}, and that of shard {of_none[0]} of none"
            )
            raise StatusError(Code.FAILED_PRECONDITION, f"{text}. Export the shards again, into one folder")
        if of_none and len(routes) > 1 and numbers[0] not in self._routes:
            text = "model %s version %d: its shards are of no export for several servers. Nothing shows that they fit together"
            logger.warning(text, file.model, numbers[0], extra=ONCE)
        self._routes[numbers[0]] = routes
        return numbers[0], (
            {DEFAULT_SIGNATURE: self._merged(routes)},
            {DEFAULT_SIGNATURE: {**in_json, "method_name": method}},
        )

    def _zeros(self, shard: str, outputs: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes of an example's outputs; None if one of them is an error when the shard does not answer.

        Raises:
            StatusError: FAILED_PRECONDITION, on_failure asks for zeros, and the signature does not say their shape.
        """
        if not outputs.keys() <= self._file.zeros:
            if some := sorted(outputs.keys() & self._file.zeros):
                others = ", ".join(sorted(outputs.keys() - self._file.zeros))
                text = f"shard {shard}: on_failure of {some[0]!r} is zeros, but not that of {others}, on the same shard"
                raise StatusError(Code.FAILED_PRECONDITION, text)
            return None
        found = {}
        for name, info in outputs.items():
            sizes = tuple(int(dim["size"]) for dim in info["tensor_shape"]["dim"])
            if len(sizes) < 2 or min(sizes[1:]) < 0:
                text = f"shard {shard}: on_failure of {name!r} is zeros, but its output has the shape {list(sizes)}"
                raise StatusError(Code.FAILED_PRECONDITION, text)
            found[name] = sizes[1:]
        return found

    def _merged(self, routes: Sequence[Route]) -> Signature:
        inputs = _by_alias(info for route in routes for info in route.signature.inputs)
        outputs = _by_alias(info for route in routes for info in route.signature.outputs)
        of_redis = {
            info.alias: value
            for route in routes
            for info, value in zip(route.signature.inputs, route.signature.padding, strict=False)
        }
        padding = tuple(self._file.padding.get(info.alias, of_redis.get(info.alias)) for info in inputs)
        return Signature(
            DEFAULT_SIGNATURE,
            inputs,
            outputs,
            padding=padding if any(value is not None for value in padding) else (),
            row_bytes=sum(route.signature.row_bytes for route in routes),
            shard_id=_export_of(routes),
            is_export_known=any(route.signature.is_export_known for route in routes),
        )

    def close(self) -> None:
        """Close the channels."""
        self._threads.shutdown()
        for states in self._states:
            states.close()


def _export_id(answer: tuple[int, Any]) -> str:
    """Return the export of a shard's definitions; empty if it tells none."""
    signature = answer[1][0].get(DEFAULT_SIGNATURE)
    return "" if signature is None else signature.export_id


def _export_of(routes: Sequence[Route]) -> str:
    """Return the export that the shards of `routes` are of; empty if none tells it."""
    return next((route.signature.export_id for route in routes if route.signature.export_id), "")


def _common(by_export: Iterable[Mapping[str, Any]]) -> set[str] | None:
    """Return the exports that all shards have which tell theirs; None if none tells it."""
    known = [set(each) for each in by_export if each.keys() != {""}]
    return set.intersection(*known) - {""} if known else None


def _by_alias(infos: Iterable[TensorInfo]) -> tuple[TensorInfo, ...]:
    return tuple(info for _, info in sorted({info.alias: info for info in infos}.items()))


class ShardedPredictions:
    """Runs requests on all shards; see Predictions. One event loop calls its methods."""

    def __init__(
        self,
        file: ShardsFile,
        accesses: Sequence["Access"],
        routes: Mapping[int, Sequence[Route]],
        doubted: set[int],
    ) -> None:
        """Open a channel to each shard. `routes` and `doubted` are those of ShardedStates."""
        from tpuembed_serving.grpc.remote_calls import RemotePredictions

        self._file, self._routes, self._doubted = file, routes, doubted
        self._next_log = dict[str, float]()
        self.clients = ShardClients(
            file.shards,
            accesses,
            lambda url: RedisPredictions(url, file.redis_password_file),
            RemotePredictions,
            lambda predictions: predictions.close(_OLD_CALLS_SECONDS),
        )
        self._predictions = self.clients.each

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
        If a replica does not have the version, or has another shard by this number, others are asked. Zeros replace the outputs
        of a shard that does not answer, if the file allows that: the outputs are DegradedOutputs then.

        Raises:
            VersionGoneError: a shard does not have the version any more.
            StatusError: that of the first shard that cannot answer; its message names it.
        """
        self.clients.update()
        named = {info.alias: array for info, array in zip(signature.inputs, inputs, strict=True)}
        sizes = {name: len(array) for name, array in named.items() if array.ndim}
        if len(set(sizes.values())) > 1:
            least, most = min(sizes, key=lambda name: sizes[name]), max(sizes, key=lambda name: sizes[name])
            text = f"input {least} has {sizes[least]} rows, but input {most} has {sizes[most]}. Send as many"
            raise StatusError(Code.INVALID_ARGUMENT, text)
        routes = self._routes.get(version)
        # A request that has waited since its version was leased may find the routes of another export by now.
        if routes is None or _export_of(routes) != signature.shard_id:
            raise VersionGoneError(f"version {version} is not on all shards any more", max(self._routes, default=None))
        for name, feature in self._file.split.items():
            check_ids(name, feature, named)
        start = asyncio.get_running_loop().time()
        calls = [self._call(route, version, named, timeout_seconds * _share(route)) for route in routes]
        waits = min(map(_share, routes)) * _HEDGE_SHARE * timeout_seconds
        started: list[asyncio.Future[Any]] = [*calls]
        try:
            await asyncio.wait(calls, timeout=waits, return_when=asyncio.FIRST_EXCEPTION)
            if all(call.done() and not call.exception() for call in calls):
                answers: Sequence[list[Array] | None] = [call.result() for call in calls]
            else:
                recoveries = [
                    asyncio.ensure_future(self._recover(route, version, named, call, start, timeout_seconds))
                    for route, call in zip(routes, calls, strict=True)
                ]
                started += recoveries
                answers = await asyncio.gather(*recoveries)
        finally:
            for each in started:
                each.cancel()
        found, zeros = dict[str, Array](), dict[str, tuple[int, ...]]()
        for route, answer in zip(routes, answers, strict=True):
            if answer is None:
                assert route.shapes is not None
                zeros |= route.shapes
                continue
            for info, value in zip(route.signature.outputs, answer, strict=True):
                found[info.alias] = found[info.alias] + value if info.alias in found else value
        rows = max(sizes.values(), default=0)
        found |= {name: np.zeros((rows, *shape), np.float32) for name, shape in zeros.items()}
        outputs = [found[info.alias] for info in signature.outputs]
        return DegradedOutputs(outputs, sorted(zeros)) if zeros else outputs

    def _call(
        self, route: Route, version: int, named: Mapping[str, Array], seconds: float
    ) -> "asyncio.Future[list[Array]]":
        inputs = [named[info.alias] for info in route.signature.inputs]
        name = self._file.shards[route.shard].name
        return asyncio.ensure_future(
            self._predictions[route.shard].run(name, version, route.signature, inputs, max(0.001, seconds))
        )

    async def _recover(
        self,
        route: Route,
        version: int,
        named: Mapping[str, Array],
        first: "asyncio.Future[list[Array]]",
        start: float,
        timeout_seconds: float,
    ) -> list[Array] | None:
        """Return the outputs of a shard, of the `first` call or of further ones. None if zeros may take their place.

        Args:
            start: when the request's time began, by the event loop's clock.
            timeout_seconds: all of the request's time.
        """
        shard, loop = self._file.shards[route.shard], asyncio.get_running_loop()
        seconds = timeout_seconds * _share(route)
        hedges, ends = start + _HEDGE_SHARE * seconds, start + seconds
        running, has_hedged, others = {first}, False, 0
        error = StatusError(Code.UNAVAILABLE, "no answer")
        try:
            while running:
                wait = None if has_hedged else max(0.0, hedges - loop.time())
                done, running = await asyncio.wait(running, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    failed = each.exception()
                    if failed is None:
                        return each.result()
                    if not isinstance(failed, StatusError):
                        raise failed
                    error = failed
                    if failed.code is Code.ABORTED:
                        self._doubted.add(version)
                        self._warn(shard.name, f"shard {shard.name}: {failed.message}. Is it a server of this shard?")
                    is_refused = failed.code in _REFUSALS and others < _REPLICAS
                    if is_refused:
                        self._warn(shard.name, f"shard {shard.name}: {_text(failed, self._file)}")
                    if is_refused or (failed.code in _ELSEWHERE and others < _OTHER_REPLICAS):
                        others += 1
                        await asyncio.sleep(_BETWEEN_SECONDS)
                        running = {*running, self._call(route, version, named, ends - loop.time())}
                    elif failed.code not in (*_ELSEWHERE, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
                        raise StatusError(_code(failed), f"shard {shard.name}: {_text(failed, self._file)}")
                is_late = not done or error.code is Code.UNAVAILABLE
                if is_late and not has_hedged:
                    has_hedged = True
                    running = {*running, self._call(route, version, named, ends - loop.time())}
        finally:
            for each in running:
                each.cancel()
        text = f"shard {shard.name}: {error.message}"
        if error.code is Code.DEADLINE_EXCEEDED:
            text = f"shard {shard.name}: has not answered within {seconds:.3g} seconds at {shard.address or shard.url}"
        if error.code in _ELSEWHERE:
            raise VersionGoneError(text, max(self._routes.keys() - {version}, default=None))
        if route.shapes is None:
            raise StatusError(error.code, text)
        self._warn(shard.name, f"its features are zeros: {text}")
        return None

    def _warn(self, shard: str, text: str) -> None:
        """Log a warning, unless there was one about this shard a short time ago."""
        now = time.monotonic()
        if now >= self._next_log.get(shard, 0):
            self._next_log[shard] = now + _LOG_SECONDS
            logger.warning("%s", text, extra=ONCE)

    def close(self) -> None:
        """Start to close the channels."""
        for predictions in self._predictions:
            predictions.close()


def _share(route: Route) -> float:
    """Return the share of the request's time that a shard has."""
    return 1.0 if route.shapes is None else _ZEROS_SHARE


def _code(error: StatusError) -> Code:
    """Return the code for the client, whose own key is not the one that a shard refuses."""
    return Code.UNAVAILABLE if error.code in _REFUSALS else error.code


def _text(error: StatusError, file: ShardsFile) -> str:
    """Return the message of a shard's error. A client cannot send the key that a shard asks for."""
    if error.code not in _REFUSALS:
        return error.message
    remedy = f"{'Set' if file.api_key_file is None else 'Correct'} api_key_file in shards.yaml"
    return f"{error.message.partition('. ')[0]}. {remedy}"
