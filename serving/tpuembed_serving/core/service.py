"""The prediction service behind REST and gRPC, which decode a request, call it, and encode the answer."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tpuembed_serving.core.classify_regress import InferenceResult, Method, check_signature, interpret, to_tensor
from tpuembed_serving.core.deadlines import remaining_seconds
from tpuembed_serving.core.servable import Array, Servable, Signature
from tpuembed_serving.core.status import Code, StatusError, invalid_argument, still_loading
from tpuembed_serving.models.model import LoadedVersion, VersionStatus
from tpuembed_serving.telemetry.request_record import RequestRecord, current_record

__all__ = [
    "DEFAULT_SIGNATURE",
    "Executor",
    "InferenceTask",
    "ModelMetadata",
    "ModelSpec",
    "Models",
    "PredictionService",
]

DEFAULT_SIGNATURE = "serving_default"


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The model that a request names. Without a version or label it is the newest available version."""

    name: str
    version: int | None = None
    label: str | None = None


@dataclasses.dataclass(frozen=True)
class InferenceTask:
    """A task of MultiInference, whose tasks share their examples. An empty name is the default signature."""

    model: str
    signature_name: str
    method: str


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


class Executor(Protocol):
    """Runs versions: a ModelExecutor, or a RemoteExecutor."""

    async def run(
        self, servable: Servable, signature: Signature, inputs: Sequence[Array], *, timeout_seconds: float | None = None
    ) -> list[Array]:
        """Return the signature's outputs. `timeout_seconds` can shorten the server's own timeout."""


class PredictionService:
    """Predict, classify, regress, status and metadata of models."""

    def __init__(self, repository: Models, executor: Executor) -> None:
        self._repository = repository
        self._executor = executor

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

        Raises:
            StatusError: the version is not available, or the label is unknown; UNAVAILABLE, the server is loading.
        """
        if self._repository.loading:
            raise still_loading()
        if not spec.name:
            raise invalid_argument("ModelSpec has no name specified.")
        record = current_record()
        if record is not None:
            record.model = spec.name
        lease = self._repository.lease(spec.name, spec.version, spec.label)
        return lease if record is None else _noted(lease, record)

    async def predict(self, servable: Servable, signature: Signature, inputs: Sequence[Array]) -> dict[str, Array]:
        """Return the signature's outputs by alias. `inputs` are in the signature's order."""
        record = current_record()
        run = self._executor.run(servable, signature, inputs, timeout_seconds=remaining_seconds())
        outputs = await run if record is None else await _timed(run, record)
        return dict(zip((info.alias for info in signature.outputs), outputs, strict=True))

    async def infer(
        self, servable: Servable, signature_name: str, method: Method, examples: Sequence[bytes]
    ) -> InferenceResult:
        """Classify or regress serialized tf.Examples.

        Raises:
            StatusError: the signature is unknown or does not support `method`; there are no examples; the run failed.
        """
        name = signature_name or DEFAULT_SIGNATURE
        signature = servable.signatures.get(name)
        if signature is None:
            raise invalid_argument(f"No signature was found with the name: {name}")
        check_signature(servable, signature, method)
        outputs = await self.predict(servable, signature, [to_tensor(examples)])
        return interpret(method, signature, outputs, len(examples))

    async def multi_infer(
        self, servable: Servable, tasks: Sequence[InferenceTask], examples: Sequence[bytes]
    ) -> list[InferenceResult]:
        """Run all tasks on the same examples at once. All tasks are checked before the first run.

        Raises:
            StatusError: a task is invalid, there are no examples, or a run failed.
        """
        methods = list(_checked(servable, tasks))
        inputs = [to_tensor(examples)]
        runs = (self.predict(servable, signature, inputs) for _, signature in methods)
        # Waits for all runs: none may continue after the lease ends.
        results = []
        for (method, signature), found in zip(
            methods, await asyncio.gather(*runs, return_exceptions=True), strict=True
        ):
            if isinstance(found, BaseException):
                raise found
            results.append(interpret(method, signature, found, len(examples)))
        return results

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

    def models(self) -> Mapping[str, Mapping[str, int]]:
        """Return the labels and their versions, by model."""
        return self._repository.labels()

    def metadata(self, spec: ModelSpec) -> ModelMetadata:
        """Return the signatures of the version that `spec` names.

        Raises:
            StatusError: see `lease`.
        """
        with self.lease(spec) as loaded:
            return ModelMetadata(spec.name, loaded.version, loaded.servable.signature_defs)


async def _timed(run: Awaitable[list[Array]], record: RequestRecord) -> list[Array]:
    """Await a run, and note its time in the record if the executor did not."""
    started = time.perf_counter()
    outputs = await run
    if not record.has_run:  # it ran in another server
        record.ran(None, 0.0, time.perf_counter() - started)
    return outputs


@contextlib.contextmanager
def _noted(lease: contextlib.AbstractContextManager[LoadedVersion], record: RequestRecord) -> Iterator[LoadedVersion]:
    """Open the lease, and note its version in the record."""
    with lease as loaded:
        record.version = loaded.version
        yield loaded


def _checked(servable: Servable, tasks: Sequence[InferenceTask]) -> Iterator[tuple[Method, Signature]]:
    """Yield the method and the signature of each task, checked."""
    seen: set[str] = set()
    for task in tasks:
        if not task.model:
            raise invalid_argument("Found ModelSpec with an empty model name.")
        if task.model != tasks[0].model:
            raise invalid_argument("All ModelSpecs in a MultiInferenceRequest must access the same model name.")
        name = task.signature_name or DEFAULT_SIGNATURE
        if name in seen:
            raise invalid_argument(f"Duplicate evaluation of signature: {name}")
        seen.add(name)
        signature = servable.signatures.get(name)
        if signature is None:
            raise invalid_argument(f"Requested signature not found in model graph: {name}")
        method = Method.named(task.method)
        check_signature(servable, signature, method)
        yield method, signature
