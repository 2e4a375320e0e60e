"""TensorFlow Serving as the runtime: models that run in another server, behind this one's APIs.

Which versions there are is asked once per poll; requests go on to the version that was the newest then. What a client sends is
decoded and checked here, and sent on over gRPC.
"""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from tpuembed_serving.core.servable import Array, Merging, Servable, Signature
from tpuembed_serving.core.status import Code, StatusError, servable_not_found
from tpuembed_serving.models.model import LoadedVersion, State, VersionStatus
from tpuembed_serving.settings import ModelSettings
from tpuembed_serving.tensorflow.import_lock import IMPORTING_TENSORFLOW

__all__ = ["RemoteExecutor", "RemoteModels", "RemoteServable"]

logger = logging.getLogger(__name__)

_POLL_TIMEOUT_SECONDS: Final = 5.0
_MAX_LABELS: Final = 64
"""Of a model, that are remembered: who asks for others waits for the other server."""


class StatusSource(Protocol):
    """What `remote_calls.RemoteStates` does."""

    def versions(self, model: str) -> list[VersionStatus]:
        """Every version, newest first."""

    def definitions(self, model: str, version: int | None, label: str = "") -> tuple[int, Any]:
        """Number and signatures of a version."""

    def close(self) -> None:
        """Hang up."""


@dataclasses.dataclass
class RemoteServable:
    """A version of a model of the other server; see Servable."""

    model: str
    version: int
    signatures: Mapping[str, Signature]
    signature_defs: Mapping[str, Any]

    def run(self, signature: Signature, inputs: Sequence[Array]) -> list[Array]:
        """It runs elsewhere: see RemoteExecutor."""
        raise NotImplementedError

    def merging(self, signature: Signature) -> Merging | None:  # noqa: ARG002 - as Servable
        """The other server batches."""
        return None

    def close(self) -> None:
        """Nothing of it is here."""


@dataclasses.dataclass
class _Model:
    """What was last heard of a model; `fault` is why nothing was."""

    statuses: Sequence[VersionStatus] = ()
    loaded: Mapping[int, RemoteServable] = dataclasses.field(default_factory=dict)
    labels: dict[str, int] = dataclasses.field(default_factory=dict)
    fault: StatusError | None = None


def _connect(target: str) -> StatusSource:
    with IMPORTING_TENSORFLOW:
        from tpuembed_serving.grpc.remote_calls import RemoteStates
    return RemoteStates(target, _POLL_TIMEOUT_SECONDS)


class RemoteModels:
    """The models of the server at `target`, in the place of a ModelRepository."""

    def __init__(
        self,
        names: Sequence[str],
        target: str,
        poll_seconds: float,
        connect: Callable[[str], StatusSource] = _connect,
    ) -> None:
        """`target`: HOST:PORT of TensorFlow Serving's gRPC API."""
        self._target, self._poll_seconds, self._connect = target, poll_seconds, connect
        self._states: StatusSource | None = None
        self._models = {name: _Model(fault=_not_reached(target)) for name in names}
        self._stopping, self._has_polled = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="remote-models", daemon=True)

    def start(self) -> None:
        """Begin to ask, in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more."""
        self._stopping.set()
        self._thread.join()
        if self._states is not None:
            self._states.close()

    @property
    def ready(self) -> bool:
        """Whether every model has an available version there."""
        return all(model.loaded and model.fault is None for model in self._models.values())

    @property
    def loading(self) -> bool:
        """Whether the other server was not asked yet."""
        return not self._has_polled.is_set()

    def wait_for_first_poll(self, stopping: Callable[[], bool]) -> None:
        """Return once the other server was asked, or where `stopping` says so."""
        while not self._has_polled.wait(0.1) and not stopping():
            pass

    @contextlib.contextmanager
    def lease(self, name: str, version: int | None, label: str | None = None) -> Iterator[LoadedVersion]:
        """A version to run requests on.

        Raises:
            StatusError: NOT_FOUND, it is not available there; INVALID_ARGUMENT, nothing has the label; UNAVAILABLE, the other
                server does not answer.
        """
        model = self._heard_of(name)
        if label is not None:
            version = self._labelled(name, model, label)
        number = max(model.loaded, default=None) if model and version is None else version
        servable = model.loaded.get(number) if model and number is not None else None
        if servable is None:
            raise servable_not_found(name, version)
        yield LoadedVersion(servable.version, servable)

    def _heard_of(self, name: str) -> "_Model | None":
        model = self._models.get(name)
        if model is not None and model.fault is not None:
            raise StatusError(model.fault.code, model.fault.message)  # a new one: each keeps the frames it is raised in
        return model

    def _labelled(self, name: str, model: _Model | None, label: str) -> int:
        """The version that has a label; the other server is asked where that is not known, which takes a moment."""
        if model is None:
            raise StatusError(Code.INVALID_ARGUMENT, f"Unrecognized servable version label: {label}")
        if label not in model.labels:
            assert self._states is not None
            number, _ = self._states.definitions(name, None, label)
            while len(model.labels) >= _MAX_LABELS:
                model.labels.pop(next(iter(model.labels)))
            model.labels[label] = number
        return model.labels[label]

    def statuses(self, name: str) -> list[VersionStatus]:
        """Every version, newest first; empty for a model that is not served here.

        Raises:
            StatusError: UNAVAILABLE, the other server does not answer.
        """
        model = self._heard_of(name)
        return list(model.statuses) if model else []

    def labels(self) -> dict[str, dict[str, int]]:
        """Every model -> its labels, as far as requests have asked for them."""
        return {name: dict(model.labels) for name, model in self._models.items()}

    def reload(self, models: Sequence[ModelSettings]) -> None:  # noqa: ARG002 - as ModelRepository
        """Refused: the other server has the config."""
        raise StatusError(
            Code.UNIMPLEMENTED, f"models run in TensorFlow Serving at {self._target}; reload its config there"
        )

    def _watch(self) -> None:
        while not self._stopping.is_set():
            for name, model in self._models.items():
                self._models[name] = self._ask(name, model)
            self._has_polled.set()
            self._stopping.wait(self._poll_seconds)

    def _ask(self, name: str, before: _Model) -> _Model:
        try:
            if self._states is None:
                self._states = self._connect(self._target)
            return self._heard(self._states, name, before)
        except StatusError as error:
            fault = error
        except Exception:  # the watch must outlive anything that another server says
            logger.exception("model %s: TensorFlow Serving at %s cannot be asked", name, self._target)
            fault = _not_reached(self._target)
        if before.fault is None:
            logger.error("model %s: %s", name, fault.message)
        return _Model(fault=fault)

    def _heard(self, states: StatusSource, name: str, before: _Model) -> _Model:
        statuses = states.versions(name)
        available = [status.version for status in statuses if status.state is State.AVAILABLE]
        loaded = {number: before.loaded.get(number) or self._servable(states, name, number) for number in available}
        for number in loaded.keys() - before.loaded.keys():
            logger.info("model %s version %d is served by TensorFlow Serving at %s", name, number, self._target)
        return _Model(statuses=statuses, loaded=loaded, labels=dict(self._labels(states, name, before)))

    def _labels(self, states: StatusSource, name: str, before: _Model) -> Iterator[tuple[str, int]]:
        """Where the labels are now that were asked for; those that are no more are forgotten."""
        for label in list(before.labels):
            with contextlib.suppress(StatusError):
                yield label, states.definitions(name, None, label)[0]

    def _servable(self, states: StatusSource, name: str, version: int) -> RemoteServable:
        _, (signatures, in_json) = states.definitions(name, version)
        return RemoteServable(name, version, signatures, in_json)


class Predictions(Protocol):
    """What `remote_calls.RemotePredictions` does."""

    async def run(
        self, model: str, version: int, signature: Signature, inputs: Sequence[Array], timeout_seconds: float
    ) -> list[Array]:
        """The outputs."""

    def close(self) -> None:
        """Hang up."""


class RemoteExecutor:
    """Runs RemoteServables, in the place of a ModelExecutor; how many at once the other server decides, and refuses."""

    def __init__(self, target: str, timeout_seconds: float, max_pending: int) -> None:
        """At most `max_pending` requests are under way."""
        self._target, self._timeout_seconds, self._max_pending = target, timeout_seconds, max_pending
        self._pending = 0
        self._predictions: Predictions | None = None

    async def run(
        self, servable: Servable, signature: Signature, inputs: Sequence[Array], *, timeout_seconds: float | None = None
    ) -> list[Array]:
        """The outputs of a RemoteServable; see ModelExecutor.

        Raises:
            StatusError: the other server's; UNAVAILABLE, there is none or too many requests are under way.
        """
        assert isinstance(servable, RemoteServable)
        if self._pending >= self._max_pending:
            text = f"{self._pending} requests wait for TensorFlow Serving at {self._target}, and no more may"
            raise StatusError(Code.UNAVAILABLE, text)
        if self._predictions is None:
            self._predictions = self._connect()
        self._pending += 1
        try:
            seconds = self._timeout_seconds if timeout_seconds is None else min(timeout_seconds, self._timeout_seconds)
            return await self._predictions.run(servable.model, servable.version, signature, inputs, seconds)
        finally:
            self._pending -= 1

    def _connect(self) -> Predictions:
        from tpuembed_serving.grpc.remote_calls import (
            RemotePredictions,
        )  # imported before by RemoteModels: no signature came without

        return RemotePredictions(self._target)

    def close(self) -> None:
        """Hang up."""
        if self._predictions is not None:
            self._predictions.close()


def _not_reached(target: str) -> StatusError:
    return StatusError(Code.UNAVAILABLE, f"TensorFlow Serving at {target} was not asked yet")
