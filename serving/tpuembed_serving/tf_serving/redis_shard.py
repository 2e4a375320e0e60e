"""A shard whose rows are in Redis. It has the interface of `grpc.remote_calls`: versions, signatures, and runs."""

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tpuembed.errors import ConfigError, MissingExtraError, RowStoreDataError, RowStoreError, UnknownTableError
from tpuembed.row_store import PublishedModel, RowStore, connect, password_of
from tpuembed_serving.batching.merging import with_padding
from tpuembed_serving.core.servable import Array, Signature, State, VersionStatus
from tpuembed_serving.core.service import DEFAULT_SIGNATURE
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.tensorflow.import_lock import IMPORTING_TENSORFLOW
from tpuembed_serving.tf_serving.redis_features import look_up
from tpuembed_serving.tf_serving.redis_rows import RedisRows

__all__ = ["RedisPredictions", "RedisStates"]

_POLL_SECONDS: Final = 5.0
_THREADS: Final = 16
"""Requests that wait for Redis at once."""


class RedisStates:
    """Queries the versions of a model in Redis, and their signatures. Its methods block."""

    def __init__(self, url: str, password_file: Path | None = None) -> None:
        """Connect later. Without a file, the password is that of the environment."""
        self._url, self._password_file = url, password_file
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
        with IMPORTING_TENSORFLOW:
            from tpuembed_serving.tensorflow.signatures import definition_of, signature_json, signature_of

        manifest = record.manifest
        definition = definition_of(**manifest.signatures[DEFAULT_SIGNATURE])
        signature = dataclasses.replace(
            with_padding(signature_of(DEFAULT_SIGNATURE, definition, is_export=True), manifest),
            shard_id=manifest.shard_id,
        )
        return version, ({DEFAULT_SIGNATURE: signature}, {DEFAULT_SIGNATURE: signature_json(definition)})

    def close(self) -> None:
        """Close the connections."""
        if self._store is not None:
            self._store.close()

    def _published(self, model: str) -> PublishedModel:
        if self._store is None:
            self._store = connect(self._url, password_of(None), password_file=self._password_file)
        return PublishedModel(self._store, model, _POLL_SECONDS)


class RedisPredictions:
    """Looks requests up in Redis, on threads. One event loop calls its methods."""

    def __init__(self, url: str, password_file: Path | None = None) -> None:
        """Connect with the first request. Without a file, the password is that of the environment."""
        self._url, self._password_file = url, password_file
        self._rows: dict[str, RedisRows] = {}
        self._connecting = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "redis")

    async def run(
        self, model: str, version: int, signature: Signature, inputs: Sequence[Array], timeout_seconds: float
    ) -> list[Array]:
        """Return the signature's outputs for `inputs`, both in the signature's order.

        Raises:
            StatusError: INVALID_ARGUMENT, an id is outside its table; NOT_FOUND, Redis does not have the version; ABORTED, the
                version is of another export now; DATA_LOSS, a row is missing or damaged; UNAVAILABLE, it cannot be reached;
                DEADLINE_EXCEEDED.
        """
        named = {info.alias: array for info, array in zip(signature.inputs, inputs, strict=True)}
        call = asyncio.get_running_loop().run_in_executor(
            self._threads, self._look_up, model, version, signature.shard_id, named, timeout_seconds
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

    def _look_up(
        self, model: str, version: int, shard_id: str, named: dict[str, Array], timeout_seconds: float
    ) -> dict[str, Array]:
        try:
            with self._connecting:
                if model not in self._rows:
                    store = connect(self._url, password_of(None), password_file=self._password_file)
                    self._rows[model] = RedisRows(store, model)
            rows, opened = self._rows[model], None
            try:
                opened = rows.open(version)
                if (found := opened.manifest.shard_id) != shard_id:
                    text = f"Redis at {rows.model.store.url}: version {version} of model {model} is the shard"
                    raise StatusError(
                        Code.ABORTED, f"{text} {found or 'of no export'}, and the request is for {shard_id}"
                    )
                return look_up(rows, opened, named, timeout_seconds)
            except RowStoreDataError:
                has_other = opened is not None and rows.has_other(opened)
                text = f"Redis at {rows.model.store.url}: version {version} of model {model} was"
                if version not in rows.model.numbers():
                    raise UnknownTableError(f"{text} removed. Send the request again") from None
                if has_other:
                    raise StatusError(Code.ABORTED, f"{text} published again. Send the request again") from None
                raise
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
