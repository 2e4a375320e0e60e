"""Answers predict requests of the REST API from the bytes of a connection, without a coroutine.

ASGI's task, scope and messages cost a request of one row more than its prediction. So the common case is handled here: a
small body of known length on a keep-alive connection. All other requests, also those without a valid API key, go through
ASGI (`tpuembed_serving.http.rest`). Decoding, runs and answers are the same.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from tpuembed_serving.batching.scheduler import ModelExecutor
from tpuembed_serving.core.api_keys import ApiKeys
from tpuembed_serving.core.off_loop import MAX_INLINE_BYTES
from tpuembed_serving.core.row_limit import check_rows
from tpuembed_serving.core.servable import Array, Signature
from tpuembed_serving.core.service import ModelSpec, PredictionService
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.http.endpoint import Reply, refusal
from tpuembed_serving.http.json import encode_outputs, parse_document, signature_name
from tpuembed_serving.http.rest import decode_request, find_post, find_signature
from tpuembed_serving.models.model import LoadedVersion
from tpuembed_serving.settings import ServerSettings
from tpuembed_serving.telemetry.observers import Telemetry
from tpuembed_serving.telemetry.request_record import (
    REQUEST_ID,
    REST,
    Headers,
    RequestRecord,
    sane_request_id,
    set_current_record,
)

__all__ = ["DirectPredict", "PredictRequest"]

_UNUSUAL: Final = frozenset({b"connection", b"content-encoding", b"expect", b"transfer-encoding", b"upgrade"})
"""Headers that this module does not handle, except `connection: keep-alive`."""

Respond = Callable[[Reply], None]


class PredictRequest:
    """A request before its body has arrived.

    Attributes:
        spec: the model that it names.
        request_id: the request ID of the answer; empty for none.
        record: the record for observers; None if there are none.
    """

    __slots__ = ("record", "request_id", "spec")

    def __init__(self, spec: ModelSpec, request_id: str, record: RequestRecord | None) -> None:
        self.spec, self.request_id, self.record = spec, request_id, record


class DirectPredict:
    """Answers predict requests without ASGI. The event loop's thread calls its methods, which do not raise."""

    def __init__(
        self, service: PredictionService, executor: ModelExecutor, settings: ServerSettings, telemetry: Telemetry
    ) -> None:
        guard, most = settings.security, settings.max_body_bytes
        self._service, self._executor = service, executor
        self._telemetry = telemetry if telemetry.observes else None
        self._parse = functools.partial(parse_document, max_depth=guard.max_json_depth)
        self._keys: ApiKeys | None = guard.api_keys
        self._max_rows = guard.max_rows
        self._max_bytes = MAX_INLINE_BYTES if most is None else min(MAX_INLINE_BYTES, most)

    def begin(self, target: bytes, headers: Headers) -> PredictRequest | None:
        """Return the POST request if it can be answered here, else None. The names of `headers` are in lower case."""
        spec = _predict_target(target)
        if spec is None:
            return None
        size, request_id = -1, None
        for name, value in headers:
            if name == b"content-length" and value.isdigit():
                size = int(value)
            elif name == REQUEST_ID and request_id is None:
                request_id = sane_request_id(value)
            elif name in _UNUSUAL and (name != b"connection" or value.lower() != b"keep-alive"):
                return None
        if not 0 <= size <= self._max_bytes or (self._keys is not None and not self._keys.accept(headers)):
            return None
        if self._telemetry is None:
            return PredictRequest(spec, request_id or "", None)
        record = _record(self._telemetry, spec, target, headers)
        return PredictRequest(spec, record.request_id or request_id or "", record)

    def answer(self, request: PredictRequest, body: bytes, respond: Respond) -> None:
        """Call `respond` with the answer to `body`, now or later."""
        record = request.record
        if record is None:
            self._start(request.spec, body, respond)
            return
        record.body(len(body))
        set_current_record(record)
        try:
            self._start(request.spec, body, functools.partial(self._finish, record, respond))
        finally:
            set_current_record(None)

    def _finish(self, record: RequestRecord, respond: Respond, reply: Reply) -> None:
        record.answered(reply.code, reply.status, len(reply.body))
        assert self._telemetry is not None
        self._telemetry.finish(record)
        respond(reply)

    def _start(self, spec: ModelSpec, body: bytes, respond: Respond) -> None:
        try:
            document = self._parse(body)
            name = signature_name(document)
            lease = self._service.lease(spec)
            loaded = lease.__enter__()
        except Exception as error:
            respond(refusal(error))
            return
        try:
            signature = find_signature(loaded.servable, name)
            inputs = decode_request(document, signature)
            if self._max_rows is not None:
                check_rows(inputs.arrays, self._max_rows)
            end = functools.partial(_end, lease, signature, inputs.row_form, respond)
            self._executor.submit(loaded.servable, signature, inputs.arrays, end)
        except Exception as error:
            lease.__exit__(None, None, None)
            respond(refusal(error))


def _record(telemetry: Telemetry, spec: ModelSpec, target: bytes, headers: Headers) -> RequestRecord:
    record = telemetry.begin(REST, "POST", target, headers)
    set_current_record(None)  # this connection's next work may belong to another request
    record.model, record.api = spec.name, "predict"
    return record


def _end(
    lease: AbstractContextManager[LoadedVersion],
    signature: Signature,
    row_form: bool,
    respond: Respond,
    outcome: list[Array] | Exception,
) -> None:
    lease.__exit__(None, None, None)
    if isinstance(outcome, Exception):
        respond(refusal(outcome))
        return
    try:
        outputs = dict(zip(signature.output_dtypes, outcome, strict=True))
        reply = Reply(200, encode_outputs(outputs, signature, row_form))
    except Exception as error:
        reply = refusal(error)
    respond(reply)


@functools.lru_cache(maxsize=1024)
def _predict_target(target: bytes) -> ModelSpec | None:
    try:
        found = find_post(target)
    except StatusError:
        return None
    return found[0] if found and found[1] == "predict" else None
