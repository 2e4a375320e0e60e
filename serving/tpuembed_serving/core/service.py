"""The models behind REST and gRPC: leases, status and metadata."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Protocol

from tpuembed_serving.core.servable import LoadedVersion, VersionStatus
from tpuembed_serving.core.status import Code, MustAskError, StatusError, invalid_argument, still_loading

__all__ = ["DEFAULT_SIGNATURE", "ModelMetadata", "ModelService", "ModelSpec", "Models"]

DEFAULT_SIGNATURE = "serving_default"
_ASK_SECONDS: Final = 10.0


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The model that a request names. Without a version or label it is the newest available version."""

    name: str
    version: int | None = None
    label: str | None = None


@dataclasses.dataclass(frozen=True)
class ModelMetadata:
    """The signatures of a version by name, in the JSON form of TensorFlow's SignatureDef."""

    name: str
    version: int
    signature_defs: Mapping[str, Any]


class Models(Protocol):
    """The source of versions: a ModelRepository, or RemoteModels."""

    @property
    def ready(self) -> bool:
        """Returns True if every model has an available version."""

    @property
    def loading(self) -> bool:
        """Returns True until the first load of every configured model has ended, with success or failure."""

    def lease(
        self, name: str, version: int | None, label: str | None = None
    ) -> contextlib.AbstractContextManager[LoadedVersion]:
        """Return a context that keeps a version loaded."""

    def statuses(self, name: str) -> list[VersionStatus]:
        """Return every version, newest first."""

    def labels(self) -> Mapping[str, Mapping[str, int]]:
        """Return the labels and their versions, by model."""


class ModelService:
    """Leases, status and metadata of models."""

    def __init__(self, repository: Models) -> None:
        self._repository = repository

    @property
    def ready(self) -> bool:
        """Returns True if every model has an available version."""
        return self._repository.ready

    @property
    def loading(self) -> bool:
        """Returns True until the first load of every configured model has ended. Until then requests are UNAVAILABLE."""
        return self._repository.loading

    def lease(self, spec: ModelSpec) -> contextlib.AbstractContextManager[LoadedVersion]:
        """Return a context that keeps the version that `spec` names loaded.

        Opening it on the event loop raises MustAskError if another server has to be asked for the label.

        Raises:
            StatusError: the version is not available, or the label is unknown; UNAVAILABLE, the server is loading.
        """
        if self._repository.loading:
            raise still_loading()
        if not spec.name:
            raise invalid_argument("ModelSpec has no name specified.")
        return self._repository.lease(spec.name, spec.version, spec.label)

    async def ask(self, spec: ModelSpec) -> None:
        """Prepare a lease: ask another server for the label that `spec` names, if it has to be asked.

        Raises:
            StatusError: there is no such label; the other server does not answer.
        """
        try:
            with self.lease(spec):
                return
        except MustAskError:
            pass
        except StatusError:
            return

        def ask() -> None:
            with self.lease(spec):
                pass

        try:
            await asyncio.wait_for(asyncio.to_thread(ask), _ASK_SECONDS)
        except TimeoutError:
            text = f"label {spec.label}: the other server has not answered within {_ASK_SECONDS:g} seconds"
            raise StatusError(Code.DEADLINE_EXCEEDED, text) from None

    def status(self, spec: ModelSpec) -> list[VersionStatus]:
        """Return the version that `spec` names, or every version, newest first. Ignores labels, as TensorFlow Serving.

        Raises:
            StatusError: NOT_FOUND, there is no such version; UNAVAILABLE, the server is loading.
        """
        if self._repository.loading:
            raise still_loading()
        statuses = self._repository.statuses(spec.name)
        if spec.version is not None:
            statuses = [status for status in statuses if status.version == spec.version]
        if not statuses:
            what = "any versions" if spec.version is None else f"version {spec.version}"
            raise StatusError(Code.NOT_FOUND, f"Could not find {what} of model {spec.name}")
        return statuses

    def versions(self, name: str) -> list[VersionStatus]:
        """Return every version of a model, newest first, even while the server is loading. Empty for an unknown model.

        Raises:
            StatusError: UNAVAILABLE, the model runs in another server, which does not answer.
        """
        return self._repository.statuses(name)

    def all_versions(self) -> list[tuple[str, list[VersionStatus]]]:
        """Return the versions of each model; none for a model of another server that does not answer."""
        found = []
        for name in self._repository.labels():
            statuses: list[VersionStatus] = []
            with contextlib.suppress(StatusError):
                statuses = self._repository.statuses(name)
            found.append((name, statuses))
        return found

    def models(self) -> Mapping[str, Mapping[str, int]]:
        """Return the labels and their versions, by model."""
        return self._repository.labels()

    async def metadata(self, spec: ModelSpec) -> ModelMetadata:
        """Return the signatures of the version that `spec` names.

        Raises:
            StatusError: see `lease`.
        """
        await self.ask(spec)
        with self.lease(spec) as loaded:
            return ModelMetadata(spec.name, loaded.version, loaded.servable.signature_defs)
