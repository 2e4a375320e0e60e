"""A shard whose rows are in Redis. It has the interface of `grpc.remote_calls`: versions, signatures, and runs."""

import asyncio
import dataclasses
import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from tpuembed.errors import ConfigError, MissingExtraError, RowStoreDataError, RowStoreError, UnknownTableError
from tpuembed.manifest import EXPORT_ID, Manifest, TensorSpec
from tpuembed.row_store import PublishedModel, RowStore, connect, password_of
from tpuembed_serving.batching.merging import with_padding
from tpuembed_serving.core.servable import Array, Signature, State, TensorInfo, VersionStatus
from tpuembed_serving.core.service import DEFAULT_SIGNATURE
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.tf_serving.redis_features import look_up
from tpuembed_serving.tf_serving.redis_rows import RedisRows

__all__ = ["RedisPredictions", "RedisStates"]

_METHOD: Final = "tensorflow/serving/predict"
_TYPES: Final[Mapping[str, tuple[str, np.dtype[Any]]]] = {
    "int64": ("int64", np.dtype(np.int64)),
    "float32": ("float", np.dtype(np.float32)),
}
"""A manifest's dtype -> its name in TensorFlow's C++, and numpy's."""
_POLL_SECONDS: Final = 5.0
_THREADS: Final = 16
"""Requests that wait for Redis at once."""


class RedisStates:
    """Queries the versions of a model in Redis, and their signatures. Its methods block."""

    def __init__(self, url: str) -> None:
        """Connect later. The password is that of the environment."""
        self._url = url
        self._store: RowStore | None = None
        self._digests: dict[int, str | None] = {}

    def versions(self, model: str) -> list[VersionStatus]:
        """Return the versions of `model` up to the current one, newest first.

        Raises:
            StatusError: NOT_FOUND, none is published; UNAVAILABLE, Redis cannot be reached.
        """
        try:
            published = self._published(model)
            current = published.current()
            numbers = [number for number in published.numbers() if current is not None and number <= current]
            before, self._digests = self._digests, {number: published.digest(number) for number in numbers}
        except (RowStoreError, ConfigError, MissingExtraError) as error:
            raise _status(error) from None
        if not numbers:
            raise StatusError(
                Code.NOT_FOUND, f"Redis at {published.store.url}: has no version of model {model}. Publish one"
            )
        same = {number: before.get(number, digest) == digest for number, digest in self._digests.items()}
        return [  # a number that another export has now is given up for one poll, so that its signature is read again
            VersionStatus(number, State.AVAILABLE if same[number] else State.END, None) for number in reversed(numbers)
        ]

    def definitions(self, model: str, version: int | None, label: str = "") -> tuple[int, Any]:
        """Return the number and the signatures of a version, as they are in its manifest.

        Raises:
            StatusError: there is no such version; a label is asked for; Redis cannot be reached.
        """
        if version is None:
            raise StatusError(
                Code.INVALID_ARGUMENT, f"label {label!r}: rows in Redis have no labels. Ask for a version"
            )
        try:
            published = self._published(model)
            record = published.version(version)
        except (RowStoreError, ConfigError, MissingExtraError) as error:
            raise _status(error) from None
        if record is None:
            raise StatusError(
                Code.NOT_FOUND, f"Redis at {published.store.url}: has no version {version} of model {model}"
            )
        signature, in_json = _signature(record.manifest)
        signature = dataclasses.replace(
            with_padding(signature, record.manifest), export_id=record.manifest.source.get(EXPORT_ID, "")
        )
        return version, ({DEFAULT_SIGNATURE: signature}, {DEFAULT_SIGNATURE: in_json})

    def close(self) -> None:
        """Close the connections."""
        if self._store is not None:
            self._store.close()

    def _published(self, model: str) -> PublishedModel:
        if self._store is None:
            self._store = connect(self._url, password_of(None))
        return PublishedModel(self._store, model, _POLL_SECONDS)


class RedisPredictions:
    """Looks requests up in Redis, on threads. One event loop calls its methods."""

    def __init__(self, url: str) -> None:
        """Connect with the first request."""
        self._url = url
        self._rows: dict[str, RedisRows] = {}
        self._connecting = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "redis")

    async def run(
        self, model: str, version: int, signature: Signature, inputs: Sequence[Array], timeout_seconds: float
    ) -> list[Array]:
        """Return the signature's outputs for `inputs`, both in the signature's order.

        Raises:
            StatusError: INVALID_ARGUMENT, an id is outside its table; NOT_FOUND, Redis does not have the version; DATA_LOSS, a row
                is missing or damaged; UNAVAILABLE, it cannot be reached; DEADLINE_EXCEEDED.
        """
        named = {info.alias: array for info, array in zip(signature.inputs, inputs, strict=True)}
        call = asyncio.get_running_loop().run_in_executor(
            self._threads, self._look_up, model, version, named, timeout_seconds
        )
        try:
            found = await asyncio.wait_for(call, timeout_seconds)
        except TimeoutError:
            text = f"Redis has not answered within {timeout_seconds:g} seconds"
            raise StatusError(Code.DEADLINE_EXCEEDED, text) from None
        return [found[info.alias] for info in signature.outputs]

    def close(self) -> None:
        """Start to close the connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for rows in self._rows.values():
            rows.model.store.close()

    def _look_up(self, model: str, version: int, named: dict[str, Array], timeout_seconds: float) -> dict[str, Array]:
        try:
            with self._connecting:
                if model not in self._rows:
                    self._rows[model] = RedisRows(connect(self._url, password_of(None)), model)
            rows = self._rows[model]
            try:
                return look_up(rows, version, named, timeout_seconds)
            except RowStoreDataError:
                if version in rows.model.numbers():
                    raise
                raise UnknownTableError(
                    f"Redis at {rows.model.store.url}: version {version} of model {model} was removed. Send the request again"
                ) from None
        except (RowStoreError, ConfigError, MissingExtraError, UnknownTableError) as error:
            raise _status(error) from None


def _status(error: Exception) -> StatusError:
    if isinstance(error, StatusError):
        return error
    code = Code.FAILED_PRECONDITION
    if isinstance(error, RowStoreDataError):
        code = Code.DATA_LOSS
    elif isinstance(error, RowStoreError):
        code = Code.UNAVAILABLE
    elif isinstance(error, UnknownTableError):
        code = Code.NOT_FOUND
    return StatusError(code, str(error).rstrip("."))


def _signature(manifest: Manifest) -> tuple[Signature, dict[str, Any]]:
    """Return `serving_default`, and its JSON form as `tensorflow.signatures.signature_json` has it."""
    sides = manifest.signatures[DEFAULT_SIGNATURE]
    inputs, outputs = (sorted(sides[side].items()) for side in ("inputs", "outputs"))
    signature = Signature(
        DEFAULT_SIGNATURE,
        tuple(_tensor(*one) for one in inputs),
        tuple(_tensor(*one) for one in outputs),
        shapes=tuple(None if spec.shape is None else tuple(_sizes(spec)) for _, spec in inputs),
        row_bytes=sum(4 * math.prod(size for size in _sizes(spec)[1:]) for _, spec in outputs),
    )
    in_json = {
        "inputs": {alias: _json(alias, spec) for alias, spec in inputs},
        "outputs": {alias: _json(alias, spec) for alias, spec in outputs},
        "method_name": _METHOD,
        "defaults": {},
    }
    return signature, in_json


def _sizes(spec: TensorSpec) -> list[int]:
    return [-1 if size is None else size for size in spec.shape or ()]


def _tensor(alias: str, spec: TensorSpec) -> TensorInfo:
    name, dtype = _TYPES[spec.dtype]
    return TensorInfo(alias, f"{alias}:0", name, dtype)


def _json(alias: str, spec: TensorSpec) -> dict[str, Any]:
    dims = [{"size": str(size), "name": ""} for size in _sizes(spec)]
    shape = {"dim": dims, "unknown_rank": spec.shape is None}
    return {"dtype": f"DT_{_TYPES[spec.dtype][0].upper()}", "tensor_shape": shape, "name": f"{alias}:0"}
