"""Serves whole models whose lookups are on shards: the shards look up, and the dense part runs here.

The dense part is the signature `from_activations` of a front, an export without the tables. A request runs on one version of the
front and of all shards.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from tpuembed.manifest import EXPORT_ID
from tpuembed_serving.batching.merging import with_padding
from tpuembed_serving.batching.scheduler import ModelExecutor
from tpuembed_serving.core.log_once import ONCE
from tpuembed_serving.core.request_record import RequestRecord
from tpuembed_serving.core.servable import (
    Array,
    DegradedOutputs,
    LoadedVersion,
    Servable,
    Signature,
    State,
    VersionStatus,
)
from tpuembed_serving.core.service import DEFAULT_SIGNATURE
from tpuembed_serving.core.status import Code, StatusError, servable_not_found, timed_out
from tpuembed_serving.models.repository import ModelRepository
from tpuembed_serving.settings import ModelSettings
from tpuembed_serving.tf_serving.proxy import ForwardedServable, RemoteExecutor, RemoteModels, RemoteServable

__all__ = ["FrontExecutor", "FrontModels"]

logger = logging.getLogger(__name__)

_FROM_ACTIVATIONS: Final = "from_activations"
Outcome = list[Array] | Exception


@dataclasses.dataclass
class FrontServable(ForwardedServable):
    """A version of the whole model.

    Attributes:
        front: the dense part.
        shards: the lookups.
        from_whole: the input of the whole model that each input of the shards is.
    """

    front: Servable
    shards: RemoteServable
    from_whole: Mapping[str, str]


class FrontModels:
    """The one model of a shards.yaml with a front; see `core.service.Models`.

    Attributes:
        local: has the versions of the front.
    """

    def __init__(self, local: ModelRepository, shards: RemoteModels) -> None:
        self.local, self._shards = local, shards
        self._servables: dict[int, FrontServable] = {}
        self._mismatch = ""
        self._misfits = dict[int, str]()

    def start(self) -> None:
        """Start to load and to poll."""
        self.local.start()
        self._shards.start()

    def stop(self) -> None:
        """Unload everything."""
        self.local.stop()
        self._shards.stop()

    @property
    def ready(self) -> bool:
        """Returns True if the front and all shards have a version in common."""
        if not (self.local.ready and self._shards.ready):
            return False
        missing = [name for name in self.local.labels() if self._newest(name) is None]
        before, self._mismatch = (
            self._mismatch,
            "; ".join(f"model {name}: {self._difference(name)}" for name in missing),
        )
        if self._mismatch not in ("", before) and not self._misfits:
            logger.warning("%s", self._mismatch, extra=ONCE)
        return not missing

    @property
    def loading(self) -> bool:
        """Returns True until the first load of the front and the first poll of the shards have ended."""
        return self.local.loading or self._shards.loading

    def wait_for_first_poll(self, stopping: Callable[[], bool]) -> None:
        """Block until both have been polled, or until `stopping` returns True."""
        self.local.wait_for_first_poll(stopping)
        self._shards.wait_for_first_poll(stopping)

    @contextlib.contextmanager
    def lease(self, name: str, version: int | None, label: str | None = None) -> Iterator[LoadedVersion]:
        """Yield a version that the front and all shards have.

        Raises:
            StatusError: NOT_FOUND, there is no such version; INVALID_ARGUMENT, a label is given; UNAVAILABLE, the front and the
                shards do not fit together, or have no version in common.
        """
        if label is not None:
            raise StatusError(Code.INVALID_ARGUMENT, f"Unrecognized servable version label: {label}")
        numbers = self._available(name) if version is None else [version]
        fault = None
        for number in numbers:
            with contextlib.ExitStack() as leases:
                try:
                    loaded = leases.enter_context(self.local.lease(name, number))
                    remote = leases.enter_context(self._shards.lease(name, number))
                    servable = self._fitting(name, number, loaded.servable, remote.servable)
                except StatusError as error:
                    if version is not None or error.code is not Code.NOT_FOUND:  # it may have gone in this moment
                        fault = fault or error
                    continue
                yield LoadedVersion(number, servable)
                return
        if fault is not None:
            raise fault
        if not self.statuses(name):
            raise servable_not_found(name, version)
        raise StatusError(Code.UNAVAILABLE, self._difference(name))

    def _fitting(self, name: str, number: int, front: Servable, shards: Servable) -> FrontServable:
        """Return the version of the whole model.

        Raises:
            StatusError: UNAVAILABLE, the front and the shards do not fit together. What the shards have is read again.
        """
        found = self._servables.get(number)
        if found is not None and found.front is front and found.shards is shards:
            return found
        assert isinstance(shards, RemoteServable)
        try:
            found = _servable(front, shards)
        except StatusError as error:
            shards.is_doubted = True
            if self._misfits.get(number) != error.message:
                self._misfits[number] = error.message
                logger.warning("model %s version %d is not served: %s", name, number, error.message, extra=ONCE)
            raise
        self._misfits.pop(number, None)
        kept = {one.version for one in self.local.statuses(name)}
        self._servables = {key: value for key, value in self._servables.items() if key in kept} | {number: found}
        return found

    def _misfit(self, name: str, number: int) -> StatusError | None:
        """Return why a version that both have cannot be served; None if it can."""
        try:
            with self.local.lease(name, number) as loaded, self._shards.lease(name, number) as remote:
                self._fitting(name, number, loaded.servable, remote.servable)
        except StatusError as error:
            return error
        return None

    def _available(self, name: str) -> list[int]:
        """Return the versions that the front and all shards have, newest first. They may not fit together."""
        on_shards = {one.version for one in self._shards.statuses(name) if one.state is State.AVAILABLE}
        local = [one.version for one in self.local.statuses(name) if one.state is State.AVAILABLE]
        return [number for number in local if number in on_shards]

    def _newest(self, name: str) -> int | None:
        return max((one.version for one in self.statuses(name) if one.state is State.AVAILABLE), default=None)

    def _difference(self, name: str) -> str:
        """Return which versions the front has, and which the shards have; or why the newest one that both have does not fit."""
        for number in self._available(name):
            if fault := self._misfit(name, number):
                return fault.message
        sides = {"the front has": self.local.statuses(name), "the shards have": self._shards.statuses(name)}
        parts = [
            f"{side} {', '.join(str(one.version) for one in statuses if one.state is State.AVAILABLE) or 'none'}"
            for side, statuses in sides.items()
        ]
        return f"no version is on the front and on all shards: {'; '.join(parts)}. Are their folders of one export?"

    def statuses(self, name: str) -> list[VersionStatus]:
        """Return every version of the front, newest first. One is available if it is on all shards too, and fits to theirs.

        Raises:
            StatusError: UNAVAILABLE, a shard does not answer.
        """
        on_shards = {one.version: one for one in self._shards.statuses(name)}
        found = []
        for status in self.local.statuses(name):
            other = on_shards.get(status.version)
            if status.state is State.AVAILABLE and (other is None or other.state is not State.AVAILABLE):
                status = other or VersionStatus(status.version, State.LOADING, None)
            elif status.state is State.AVAILABLE and (fault := self._misfit(name, status.version)):
                status = VersionStatus(status.version, State.START, fault)
            found.append(status)
        return found

    def labels(self) -> Mapping[str, Mapping[str, int]]:
        """Return the model, without labels."""
        return self.local.labels()

    def reload(self, models: Sequence[ModelSettings]) -> None:
        """Raise UNIMPLEMENTED: the shards.yaml has the model."""
        self._shards.reload(models)

    reload_by_client = reload


def _servable(front: Servable, shards: RemoteServable) -> FrontServable:
    from tpuembed_serving.tensorflow.session import SavedModelServable
    from tpuembed_serving.tensorflow.signatures import definition_of, signature_json, signature_of

    manifest = front.manifest if isinstance(front, SavedModelServable) else None
    if manifest is None or not manifest.front:
        text = "the front is an export of another kind. Take the one that `tpuembed export --model --shards` wrote"
        raise StatusError(Code.UNAVAILABLE, text)
    definition = definition_of(manifest.front["inputs"], manifest.front["outputs"])
    signature = with_padding(signature_of(DEFAULT_SIGNATURE, definition, is_export=True), manifest)
    from_whole = {}
    for entry in manifest.from_activations.features:
        from_whole[entry.name] = entry.ids
        if entry.weighted:
            from_whole[f"{entry.name}_weights"] = entry.weights
    lookups, own = shards.signatures[DEFAULT_SIGNATURE], manifest.source.get(EXPORT_ID, "")
    if lookups.export_id != own and (lookups.export_id or lookups.is_of_no_export):
        text = f"the front is of the export {own or 'unknown'}, and the shards are of {_named(lookups.export_id)}"
        raise StatusError(Code.UNAVAILABLE, f"{text}. Take both from one export")
    asked = {info.alias for info in lookups.inputs}
    if asked != from_whole.keys():
        text = f"the shards take {', '.join(sorted(asked))}, and the front needs {', '.join(sorted(from_whole))}"
        raise StatusError(Code.UNAVAILABLE, f"{text}. Export both again, into one folder")
    in_json = signature_json(definition)
    return FrontServable({DEFAULT_SIGNATURE: signature}, {DEFAULT_SIGNATURE: in_json}, front, shards, from_whole)


def _named(export_id: str) -> str:
    return f"the export {export_id}" if export_id else "none"


@dataclasses.dataclass
class _FrontRun:
    """A request in progress: first on the shards, then on the front."""

    remote: "asyncio.Task[None] | None" = None
    local: Any = None


class FrontExecutor:
    """Runs FrontServables; see `core.pipeline.Executor`."""

    def __init__(self, local: ModelExecutor, shards: RemoteExecutor) -> None:
        """Run the dense part with `local`, and the lookups with `shards`."""
        self.local, self._shards = local, shards

    def submit(
        self,
        servable: Servable,
        signature: Signature,
        inputs: Sequence[Array],
        on_outcome: Callable[[Outcome], None],
        *,
        timeout_seconds: float | None = None,
        record: RequestRecord | None = None,
    ) -> _FrontRun:
        """Look up on the shards, then run the dense part.

        Raises:
            StatusError: UNAVAILABLE, too many requests are in progress.
        """
        assert isinstance(servable, FrontServable)
        named = {info.alias: array for info, array in zip(signature.inputs, inputs, strict=True)}
        lookups = servable.shards.signatures[DEFAULT_SIGNATURE]
        dense = servable.front.signatures[_FROM_ACTIVATIONS]
        run = _FrontRun()
        ends = None if timeout_seconds is None else time.monotonic() + timeout_seconds

        def looked_up(outcome: Outcome) -> None:
            if isinstance(outcome, Exception):
                on_outcome(outcome)
                return
            activations = {info.alias: array for info, array in zip(lookups.outputs, outcome, strict=True)}
            degraded = outcome.features if isinstance(outcome, DegradedOutputs) else ()
            seconds = None if ends is None else ends - time.monotonic()
            try:
                if seconds is not None and seconds <= 0:
                    raise timed_out()
                run.local = self.local.submit(
                    servable.front,
                    dense,
                    [
                        activations[info.alias] if info.alias in activations else named[info.alias]
                        for info in dense.inputs
                    ],
                    lambda outputs: on_outcome(_marked(outputs, dense, signature, degraded)),
                    timeout_seconds=seconds,
                    record=record,
                )
            except StatusError as error:
                on_outcome(error)

        run.remote = self._shards.submit(
            servable.shards,
            lookups,
            [named[servable.from_whole[info.alias]] for info in lookups.inputs],
            looked_up,
            timeout_seconds=timeout_seconds,
        )
        return run

    def give_up(self, run: _FrontRun) -> None:
        """Stop a request that nobody waits for."""
        if run.local is not None:
            self.local.give_up(run.local)
        elif run.remote is not None:
            self._shards.give_up(run.remote)

    def close(self) -> None:
        """Stop the threads, and close the connections."""
        self._shards.close()
        self.local.close()


def _marked(outputs: Outcome, dense: Signature, signature: Signature, degraded: Sequence[str]) -> Outcome:
    """Return the outputs in the order of the whole model's signature."""
    if isinstance(outputs, Exception):
        return outputs
    found = {info.alias: array for info, array in zip(dense.outputs, outputs, strict=True)}
    ordered = [found[info.alias] for info in signature.outputs]
    return DegradedOutputs(ordered, degraded) if degraded else ordered
