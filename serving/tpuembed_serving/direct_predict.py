"""Predict requests of the REST API, answered from the bytes of a connection without a coroutine.

ASGI's task, scope and messages cost a request of one row more than its prediction. What is common goes this way: a small body of
known length, over a connection that is used again. Everything else, and every request where somebody observes, limits or checks
keys, goes by ASGI (see `tpuembed_serving.rest`), with the same decoding, the same runs and the same answers.
"""

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Final, NamedTuple

from tpuembed_serving.executor import ModelExecutor
from tpuembed_serving.http_endpoint import Reply, refusal
from tpuembed_serving.json_codec import encode_outputs, parse_document, signature_name
from tpuembed_serving.observation import REQUEST_ID, sane_request_id
from tpuembed_serving.off_loop import MAX_INLINE_BYTES
from tpuembed_serving.rest import decode_request, find_post, find_signature
from tpuembed_serving.servable import Array, Signature
from tpuembed_serving.served_model import LoadedVersion
from tpuembed_serving.service import ModelSpec, PredictionService
from tpuembed_serving.status import StatusError

__all__ = ["DirectPredict", "PredictRequest"]

_UNUSUAL: Final = frozenset({b"connection", b"content-encoding", b"expect", b"transfer-encoding", b"upgrade"})
"""Headers that ask for more than this module does, but for `connection: keep-alive`."""


class PredictRequest(NamedTuple):
    """What is known of a request before its body is there; `request_id` is the client's, or empty."""

    spec: ModelSpec
    request_id: str


class DirectPredict:
    """See the module. Its methods belong to the event loop's thread, and do not raise."""

    def __init__(
        self,
        service: PredictionService,
        executor: ModelExecutor,
        max_body_bytes: int | None,
        max_json_depth: int | None,
    ) -> None:
        self._service, self._executor = service, executor
        self._parse = functools.partial(parse_document, max_depth=max_json_depth)
        self._most = MAX_INLINE_BYTES if max_body_bytes is None else min(MAX_INLINE_BYTES, max_body_bytes)

    def takes(self, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> PredictRequest | None:
        """The POST request, where it goes this way; names of `headers` are in lower case."""
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
        return PredictRequest(spec, request_id or "") if 0 <= size <= self._most else None

    def answer(self, spec: ModelSpec, body: bytes, send: Callable[[Reply], None]) -> None:
        """Have `send` told the answer to `body`, now or later."""
        try:
            document = self._parse(body)
            name = signature_name(document)
            lease = self._service.lease(spec)
            loaded = lease.__enter__()
        except Exception as error:
            send(refusal(error))
            return
        try:
            signature = find_signature(loaded.servable, name)
            inputs = decode_request(document, loaded.servable, signature)
            finish = functools.partial(_finish, lease, signature, inputs.row_form, send)
            self._executor.submit(loaded.servable, signature, inputs.arrays, finish)
        except Exception as error:
            lease.__exit__(None, None, None)
            send(refusal(error))


def _finish(
    lease: AbstractContextManager[LoadedVersion],
    signature: Signature,
    row_form: bool,
    send: Callable[[Reply], None],
    outcome: list[Array] | Exception,
) -> None:
    lease.__exit__(None, None, None)
    if isinstance(outcome, Exception):
        send(refusal(outcome))
        return
    try:
        outputs = dict(zip(signature.output_dtypes, outcome, strict=True))
        reply = Reply(200, encode_outputs(outputs, signature, row_form))
    except Exception as error:
        reply = refusal(error)
    send(reply)


@functools.lru_cache(maxsize=1024)
def _predict_target(target: bytes) -> ModelSpec | None:
    try:
        found = find_post(target)
    except StatusError:
        return None
    return found[0] if found and found[1] == "predict" else None
