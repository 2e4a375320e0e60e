"""TensorFlow Serving's REST API under /v1/ as a raw ASGI application: URLs, status codes, bodies."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import re
import urllib.parse
import zlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeVar

from tpuembed_serving.inference import Method
from tpuembed_serving.json_codec import (
    decode_examples,
    decode_inputs,
    encode_error,
    encode_outputs,
    encode_result,
    parse_document,
    signature_name,
)
from tpuembed_serving.repository import VersionStatus
from tpuembed_serving.servable import Servable, Signature
from tpuembed_serving.service import DEFAULT_SIGNATURE, ModelMetadata, ModelSpec, PredictionService
from tpuembed_serving.status import Code, StatusError, invalid_argument
from tpuembed_serving.versions import parse_version

__all__ = ["HTTP_STATUS", "RestApi", "is_api_request"]

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_Result = TypeVar("_Result")

HTTP_STATUS = {
    Code.OK: 200,
    Code.CANCELLED: 499,
    Code.UNKNOWN: 500,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.OUT_OF_RANGE: 400,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.DATA_LOSS: 500,
    Code.UNAUTHENTICATED: 401,
}
"""Of TensorFlow Serving's http_server.cc, ToHTTPStatusCode."""

_BODY_TOO_LARGE = 413
_MAX_INFLATED_BYTES = 100 * 2**20
_MAX_INLINE_BYTES = 256 * 2**10
"""A larger body is decoded off the event loop, so that small requests do not wait for it."""
_MODEL = rb"/([^/:?]+)"  # a query never matches
_CHOICE = rb"(?:(?:/versions/([0-9]+))|(?:/labels/([^/:?]+)))?"
_POST = re.compile(rb"(?i)/v1/models" + _MODEL + _CHOICE + rb":(classify|regress|predict)")
_GET = re.compile(rb"(?i)/v1/models(?:" + _MODEL + rb")?" + _CHOICE + rb"(?:/(metadata))?")
_INFERENCE = {b"classify": Method.CLASSIFY, b"regress": Method.REGRESS}
_ORIGIN = re.compile(rb"https?://")


def is_api_request(scope: Scope) -> bool:
    """Whether a connection scope is an HTTP request that this module answers."""
    return scope["type"] == "http" and _path(scope)[:4].lower() == b"/v1/"


def _target(scope: Scope) -> bytes:
    """Path and query as they were sent; theirs matches its patterns against both."""
    path, query = _path(scope), scope.get("query_string", b"")
    return path + b"?" + query if query else path


def _path(scope: Scope) -> bytes:
    return scope.get("raw_path") or urllib.parse.quote(scope["path"]).encode("ascii")


@dataclasses.dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    body: bytes


class _DisconnectedError(Exception):
    """The client left before its request was complete."""


class RestApi:
    """Decodes a request, calls the service, encodes the answer."""

    def __init__(self, service: PredictionService, max_body_bytes: int | None) -> None:
        self._service = service
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        with contextlib.suppress(_DisconnectedError):
            reply = await self._reply(scope, receive)
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(reply.body))]
            await send({"type": "http.response.start", "status": reply.status, "headers": headers})
            await send({"type": "http.response.body", "body": reply.body})

    async def _reply(self, scope: Scope, receive: Receive) -> _Reply:
        try:
            return await self._answer(scope, receive)
        except StatusError as error:
            return _Reply(HTTP_STATUS[error.code], encode_error(error.message))
        except _DisconnectedError:
            raise
        except Exception:
            logger.exception("a request failed")
            return _Reply(HTTP_STATUS[Code.INTERNAL], encode_error("internal error"))

    async def _answer(self, scope: Scope, receive: Receive) -> _Reply:
        method, target = scope["method"], _target(scope)
        if method == "POST" and (match := _POST.fullmatch(target)):
            return await self._post(match, scope, receive)
        if method == "GET" and (match := _GET.fullmatch(target)):
            return _Reply(200, self._get(match))
        if method == "OPTIONS":
            origin = _header(scope, b"origin")
            return _Reply(HTTP_STATUS[Code.OK if _ORIGIN.search(origin) else Code.FAILED_PRECONDITION], b"")
        raise _malformed(method, target)

    async def _post(self, match: re.Match[bytes], scope: Scope, receive: Receive) -> _Reply:
        spec, method = _spec(match), match[4]
        body = await self._read(scope, receive)
        if body is None:
            text = f"the request body is larger than the limit of {self._max_body_bytes} bytes"
            return _Reply(_BODY_TOO_LARGE, encode_error(text))
        if method == b"predict":
            return _Reply(200, await self._predict(spec, body))
        if method in _INFERENCE:
            return _Reply(200, await self._infer(spec, _INFERENCE[method], body))
        raise _malformed("POST", _target(scope))

    async def _predict(self, spec: ModelSpec, body: bytes) -> bytes:
        run = _run_inline if len(body) <= _MAX_INLINE_BYTES else asyncio.to_thread
        document = await run(parse_document, body)
        name = signature_name(document)
        with self._service.lease(spec) as loaded:
            signature = _find_signature(loaded.servable, name)
            inputs = await run(decode_inputs, document, signature)
            outputs = await self._service.predict(loaded.servable, signature, inputs.arrays)
        return await run(encode_outputs, outputs, signature, inputs.row_form)

    async def _infer(self, spec: ModelSpec, method: Method, body: bytes) -> bytes:
        """Unlike predict's, the request is read to its end before the model is looked up."""
        run = _run_inline if len(body) <= _MAX_INLINE_BYTES else asyncio.to_thread
        document = await run(parse_document, body)
        name = signature_name(document)
        examples = await run(decode_examples, document)
        with self._service.lease(spec) as loaded:
            result = await self._service.infer(loaded.servable, name, method, examples)
        return await run(encode_result, result)

    def _get(self, match: re.Match[bytes]) -> bytes:
        if match[1] is None:
            raise invalid_argument("Missing model name in request.")
        spec = _spec(match)
        # Compared as it was sent: "/METADATA" matches the pattern and is a status request.
        if match[4] == b"metadata":
            return _metadata_json(self._service.metadata(spec))
        return _status_json(self._service.status(spec))

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body, inflated where it is compressed; None where it is over the limit."""
        parts: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _DisconnectedError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if self._max_body_bytes is not None and size > self._max_body_bytes:
                return None
            more = message.get("more_body", False)
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        return _inflate(body) if b"gzip" in _header(scope, b"content-encoding") else body


async def _run_inline(function: Callable[..., _Result], *args: Any) -> _Result:
    return function(*args)


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _inflate(body: bytes) -> bytes:
    """Empty where it is no gzip or too large, which is then refused as an empty document, as theirs is."""
    inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        inflated = inflater.decompress(body, _MAX_INFLATED_BYTES)
    except zlib.error:
        return b""
    return inflated if inflater.eof else b""


def _malformed(method: str, target: bytes) -> StatusError:
    return invalid_argument(f"Malformed request: {method} {_text(target)}")


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def _spec(match: re.Match[bytes]) -> ModelSpec:
    name, version, label = match[1], match[2], match[3]
    return ModelSpec(
        name=_text(urllib.parse.unquote_to_bytes(name)),
        version=None if version is None else _version(_text(version)),
        label=None if label is None else _text(urllib.parse.unquote_to_bytes(label)),
    )


def _version(text: str) -> int:
    version = parse_version(text)
    if version is None:
        raise invalid_argument(f"Failed to convert version: {text} to numeric.")
    return version


def _find_signature(servable: Servable, name: str) -> Signature:
    signature = servable.signatures.get(name or DEFAULT_SIGNATURE)
    if signature is None:
        raise invalid_argument(f'Serving signature name: "{name or DEFAULT_SIGNATURE}" not found in signature def')
    if not signature.inputs:
        raise invalid_argument(f"Failed to get input map for signature: {name or 'DEFAULT'}")
    return signature


def _status_json(statuses: Iterable[VersionStatus]) -> bytes:
    return _message({"model_version_status": [_version_status(status) for status in statuses]})


def _version_status(status: VersionStatus) -> dict[str, Any]:
    code, message = (Code.OK, "") if status.error is None else (status.error.code, status.error.message)
    error = {"error_code": code.name, "error_message": message}
    return {"version": str(status.version), "state": status.state.name, "status": error}


def _metadata_json(metadata: ModelMetadata) -> bytes:
    """Two messages, put together by hand (http_rest_api_util.cc, ToJsonString)."""
    spec = _message({"name": metadata.name, "signature_name": "", "version": str(metadata.version)})
    signatures = _message({"signature_def": dict(metadata.signature_defs)})
    return b'{\n"model_spec":%b,\n"metadata": {"signature_def": %b}\n}\n' % (spec, signatures)


def _message(value: Any) -> bytes:
    """A protocol buffer message as protobuf's own JSON printer lays it out."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "replace")
