"""Serves models that run in a TensorFlow Serving server.

The versions are polled; a request runs on the newest version of the last poll. Requests are decoded and checked here,
then forwarded over gRPC.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tpuembed_serving.core.log_once import ONCE
from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.request_record import RequestRecord
from tpuembed_serving.core.servable import Array, LoadedVersion, Merging, Servable, Signature, State, VersionStatus
from tpuembed_serving.core.status import Code, MustAskError, StatusError, servable_not_found
from tpuembed_serving.settings import ModelSettings
from tpuembed_serving.tensorflow.import_lock import IMPORTING_TENSORFLOW

if TYPE_CHECKING:
    from tpuembed_serving.grpc.remote_calls import RemotePredictions, RemoteStates

__all__ = ["RemoteExecutor", "RemoteModels", "RemoteServable", "TensorFlowServing"]

logger = logging.getLogger(__name__)

_POLL_TIMEOUT_SECONDS: Final = 5.0


class TensorFlowServing:
    """One server of TensorFlow Serving's gRPC API, at HOST:PORT."""

    def __init__(self, target: str) -> None:
        """Open nothing yet."""
        self._target, self.name = target, f"TensorFlow Serving at {target}"

    def states(self) -> "RemoteStates":
        """Connect for queries of versions."""
        with IMPORTING_TENSORFLOW:
            from tpuembed_serving.grpc.remote_calls import RemoteStates
        return RemoteStates(self._target, _POLL_TIMEOUT_SECONDS)

    def predictions(self) -> "RemotePredictions":
        """Connect for requests, on the event loop that is running."""
        from tpuembed_serving.grpc.remote_calls import RemotePredictions  # RemoteModels has imported it before

        return RemotePredictions(self._target)


@dataclasses.dataclass
class RemoteServable:
    """A version in the other server; see Servable. `model` and `version` are its name and number there."""

    signatures: Mapping[str, Signature]
    signature_defs: Mapping[str, Any]
    model: str
    version: int

    def run(self, signature: Signature, inputs: Sequence[Array]) -> list[Array]:
        """Raise NotImplementedError: a RemoteExecutor runs it."""
        raise NotImplementedError

    def merging(self, signature: Signature) -> Merging | None:  # noqa: ARG002 - as Servable
        """Return None: the other server batches."""
        return None

    def knows_merging(self, signature: Signature) -> bool:  # noqa: ARG002 - as Servable
        """Return True."""
        return True

    def close(self) -> None:
        """Do nothing: the other server unloads the version."""


@dataclasses.dataclass
class _Model:
    """The result of the last poll of a model.

    Attributes:
        labels: the labels that requests have used: the version of each, and until when it counts, by `time.monotonic`.
        fault: the error of a poll that failed.
    """

    statuses: Sequence[VersionStatus] = ()
    loaded: Mapping[int, RemoteServable] = dataclasses.field(default_factory=dict)
    labels: dict[str, tuple[int, float]] = dataclasses.field(default_factory=dict)
    fault: StatusError | None = None


class RemoteModels:
    """The models of another server. Takes the place of a ModelRepository."""

    def __init__(
        self,
        names: Sequence[str],
        server: TensorFlowServing,
        poll_seconds: float,
        *,
        changed: Callable[[], None] = noop,
    ) -> None:
        """Prepare the poll.

        Args:
            names: of the models.
            server: the other server.
            poll_seconds: time between polls.
            changed: called after a poll that changes whether every model is available.
        """
        self._changed, self._was_ready = changed, False
        self._server, self._poll_seconds = server, poll_seconds
        self._states: RemoteStates | None = None
        self._models = {name: _Model(fault=_not_polled(server.name)) for name in names}
        self._stopping, self._has_polled = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="remote-models", daemon=True)

    def start(self) -> None:
        """Start polling in a background thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling and close the connection."""
        self._stopping.set()
        self._thread.join()
        if self._states is not None:
            self._states.close()

    @property
    def ready(self) -> bool:
        """Returns True if every model has an available version in the other server."""
        return all(model.loaded and model.fault is None for model in self._models.values())

    @property
    def loading(self) -> bool:
        """Returns True until the first poll has ended."""
        return not self._has_polled.is_set()

    def wait_for_first_poll(self, stopping: Callable[[], bool]) -> None:
        """Block until the first poll has ended, or until `stopping` returns True."""
        while not self._has_polled.wait(0.1) and not stopping():
            pass

    @contextlib.contextmanager
    def lease(self, name: str, version: int | None, label: str | None = None) -> Iterator[LoadedVersion]:
        """Yield a version to run requests on.

        Raises:
            StatusError: NOT_FOUND, the version is not available there; UNAVAILABLE, the other server does not answer.
            MustAskError: the other server has to be asked for the label, for which the event loop cannot wait.
        """
        model = self._find(name)
        if label is not None:
            version = self._labelled(name, model, label)
        number = max(model.loaded, default=None) if model and version is None else version
        servable = model.loaded.get(number) if model and number is not None else None
        if servable is None:
            raise servable_not_found(name, version)
        yield LoadedVersion(servable.version, servable)

    def _find(self, name: str) -> "_Model | None":
        model = self._models.get(name)
        if model is not None and model.fault is not None:
            raise StatusError(
                model.fault.code, model.fault.message
            )  # a copy: an exception keeps the frames that raise it
        return model

    def _labelled(self, name: str, model: _Model | None, label: str) -> int:
        """Return the version that a label names. Asks the other server, unless it has answered since the last poll."""
        if model is None:
            raise StatusError(Code.INVALID_ARGUMENT, f"Unrecognized servable version label: {label}")
        number, until = model.labels.get(label, (0, 0.0))
        if time.monotonic() >= until:
            if _is_on_event_loop():
                raise MustAskError(label)
            assert self._states is not None
            number, _ = self._states.definitions(name, None, label)
            model.labels[label] = number, time.monotonic() + self._poll_seconds
        return number

    def statuses(self, name: str) -> list[VersionStatus]:
        """Return every version, newest first. Empty for a model that is not served here.

        Raises:
            StatusError: UNAVAILABLE, the other server does not answer.
        """
        model = self._find(name)
        return list(model.statuses) if model else []

    def labels(self) -> dict[str, dict[str, int]]:
        """Return the cached labels of every model. Only labels that requests have used are cached."""
        now = time.monotonic()
        return {
            name: {label: number for label, (number, until) in model.labels.copy().items() if now < until}
            for name, model in self._models.items()
        }

    def reload(self, models: Sequence[ModelSettings]) -> None:  # noqa: ARG002 - as ModelRepository
        """Raise UNIMPLEMENTED: the other server has the config."""
        raise StatusError(Code.UNIMPLEMENTED, f"models run in {self._server.name}. Reload its config there")

    reload_by_client = reload

    def _watch(self) -> None:
        while not self._stopping.is_set():
            for name, model in self._models.items():
                self._models[name] = self._poll(name, model)
            self._has_polled.set()
            was, self._was_ready = self._was_ready, self.ready
            if was is not self._was_ready:
                self._changed()
            self._stopping.wait(self._poll_seconds)

    def _poll(self, name: str, before: _Model) -> _Model:
        try:
            if self._states is None:
                self._states = self._server.states()
            return self._query(self._states, name, before)
        except StatusError as error:
            fault = error
        except Exception:  # polling must survive any answer of the other server
            logger.exception("model %s: the poll of %s failed", name, self._server.name)
            fault = _not_polled(self._server.name)
        if before.fault is None or before.fault.message != fault.message:
            logger.error("model %s: %s", name, fault.message, extra=ONCE)
        return _Model(fault=fault)

    def _query(self, states: "RemoteStates", name: str, before: _Model) -> _Model:
        statuses, loaded = states.versions(name), {}
        for index, status in enumerate(statuses):
            number = status.version
            if status.state is not State.AVAILABLE:
                continue
            kept = before.loaded.get(number)
            try:
                # Read with each poll, because the other server may have another export under the same number.
                _, (signatures, in_json) = states.definitions(name, number)
                found = RemoteServable(signatures, in_json, name, number)
                loaded[number] = kept if kept is not None and kept == found else found
            except StatusError as error:
                if kept is not None:
                    loaded[number] = kept
                elif error.code is Code.NOT_FOUND:  # it has gone since, or another replica does not have it yet
                    statuses[index] = VersionStatus(number, State.START, error)
                else:
                    raise
        for number in loaded.keys() - before.loaded.keys():
            logger.info("model %s version %d is available on %s", name, number, self._server.name, extra=ONCE)
        for number in before.loaded.keys() - loaded.keys():
            text = "model %s version %d is not available any more on %s"
            logger.info(text, name, number, self._server.name, extra=ONCE)
        return _Model(statuses, loaded, before.labels)


class RemoteExecutor:
    """Runs RemoteServables. Takes the place of a ModelExecutor. The other server limits how many run at once."""

    def __init__(self, server: TensorFlowServing, timeout_seconds: float, max_pending: int) -> None:
        """Prepare to call `server`. At most `max_pending` requests are in progress."""
        self._server, self._timeout_seconds, self._max_pending = server, timeout_seconds, max_pending
        self._pending = 0
        self._predictions: RemotePredictions | None = None

    def submit(
        self,
        servable: Servable,
        signature: Signature,
        inputs: Sequence[Array],
        on_outcome: Callable[[list[Array] | Exception], None],
        *,
        timeout_seconds: float | None = None,
        record: RequestRecord | None = None,
    ) -> "asyncio.Task[None]":
        """Run a RemoteServable; see ModelExecutor. Errors are the other server's, or UNAVAILABLE if it cannot be reached.

        Raises:
            StatusError: UNAVAILABLE, too many requests are in progress.
        """
        assert isinstance(servable, RemoteServable)
        if self._pending >= self._max_pending:
            text = f"too many requests wait for {self._server.name} (limit: {self._max_pending})"
            raise StatusError(Code.UNAVAILABLE, text)
        if self._predictions is None:
            self._predictions = self._server.predictions()
        seconds = self._timeout_seconds if timeout_seconds is None else min(timeout_seconds, self._timeout_seconds)
        call = functools.partial(
            self._predictions.run, servable.model, servable.version, signature, inputs, seconds
        )  # not a coroutine yet: a task that is cancelled before it starts would never await it
        self._pending += 1
        task = asyncio.get_running_loop().create_task(self._finish(call, on_outcome, record))
        task.add_done_callback(self._end)
        return task

    async def _finish(
        self,
        call: Callable[[], Awaitable[list[Array]]],
        on_outcome: Callable[[list[Array] | Exception], None],
        record: RequestRecord | None,
    ) -> None:
        started = time.perf_counter()
        outcome: list[Array] | Exception
        try:
            outcome = await call()
        except Exception as error:
            outcome = error
        if record is not None:
            record.ran(None, 0.0, time.perf_counter() - started)
        on_outcome(outcome)

    def _end(self, _: "asyncio.Task[None]") -> None:
        self._pending -= 1

    def give_up(self, run: "asyncio.Task[None]") -> None:
        """Cancel a call that nobody waits for."""
        run.cancel()

    def close(self) -> None:
        """Close the connection."""
        if self._predictions is not None:
            self._predictions.close()


def _not_polled(server: str) -> StatusError:
    return StatusError(Code.UNAVAILABLE, f"no answer of {server} yet")


def _is_on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
