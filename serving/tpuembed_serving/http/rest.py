"""TensorFlow Serving's REST API under /v1/, as a raw ASGI application: URLs, status codes, bodies."""

import asyncio
import functools
import json
import re
import urllib.parse
from typing import Any

from tpuembed_serving.core.classify_regress import Method
from tpuembed_serving.core.off_loop import MAX_INLINE_BYTES, run_sized
from tpuembed_serving.core.servable import Servable, Signature
from tpuembed_serving.core.service import DEFAULT_SIGNATURE, ModelMetadata, ModelSpec, PredictionService
from tpuembed_serving.core.status import Code, StatusError, invalid_argument
from tpuembed_serving.http.endpoint import (
    HTTP_STATUS,
    HttpEndpoint,
    Receive,
    Reply,
    Scope,
    header,
    raw_path,
    raw_target,
)
from tpuembed_serving.http.json import (
    Document,
    PredictInputs,
    decode_examples,
    decode_inputs,
    encode_outputs,
    encode_result,
    pad_ragged,
    parse_document,
    signature_name,
)
from tpuembed_serving.models.repository import VersionStatus
from tpuembed_serving.models.versions import parse_version
from tpuembed_serving.telemetry.observers import Telemetry
from tpuembed_serving.telemetry.request_record import name_request

__all__ = [
    "HTTP_STATUS",
    "RestApi",
    "decode_request",
    "find_post",
    "find_signature",
    "is_api_request",
    "model_spec",
    "version_status",
]


_MODEL = rb"/([^/:?]+)"  # a query never matches
_CHOICE = rb"(?:(?:/versions/([0-9]+))|(?:/labels/([^/:?]+)))?"
_POST = re.compile(rb"(?i)/v1/models" + _MODEL + _CHOICE + rb":(classify|regress|predict)")
_GET = re.compile(rb"(?i)/v1/models(?:" + _MODEL + rb")?" + _CHOICE + rb"(?:/(metadata))?")
_INFERENCE = {"classify": Method.CLASSIFY, "regress": Method.REGRESS}
_ORIGIN = re.compile(rb"https?://")


def is_api_request(scope: Scope) -> bool:
    """Returns True if a connection scope is an HTTP request to the REST API."""
    return scope["type"] == "http" and raw_path(scope)[:4].lower() == b"/v1/"


class RestApi(HttpEndpoint):
    """Decodes a request, calls the service, encodes the answer."""

    def __init__(
        self,
        service: PredictionService,
        max_body_bytes: int | None,
        telemetry: Telemetry | None = None,
        max_json_depth: int | None = None,
    ) -> None:
        super().__init__(max_body_bytes, telemetry)
        self._service = service
        self._parse = functools.partial(parse_document, max_depth=max_json_depth)

    async def answer(self, scope: Scope, receive: Receive) -> Reply:
        """Answer a request; see HttpEndpoint."""
        method, target = scope["method"], raw_target(scope)
        if method == "POST" and (found := find_post(target)):
            return await self._post(*found, scope, receive)
        if method == "GET" and (match := _GET.fullmatch(target)):
            return Reply(200, self._get(match))
        if method == "OPTIONS":
            code = Code.OK if _ORIGIN.search(header(scope, b"origin")) else Code.FAILED_PRECONDITION
            return Reply(HTTP_STATUS[code], b"", code)
        raise _malformed(method, target)

    async def _post(self, spec: ModelSpec, method: str, scope: Scope, receive: Receive) -> Reply:
        name_request(spec.name, method)
        body = await self.read(scope, receive)
        if method == "predict":
            return Reply(200, await self._predict(spec, body))
        if method in _INFERENCE:
            return Reply(200, await self._infer(spec, _INFERENCE[method], body))
        raise _malformed("POST", raw_target(scope))

    async def _predict(self, spec: ModelSpec, body: bytes) -> bytes:
        if len(body) > MAX_INLINE_BYTES:
            return await self._predict_apart(spec, body)
        document = self._parse(body)
        name = signature_name(document)
        with self._service.lease(spec) as loaded:
            signature = find_signature(loaded.servable, name)
            inputs = decode_request(document, signature)
            outputs = await self._service.predict(loaded.servable, signature, inputs.arrays)
        return encode_outputs(outputs, signature, inputs.row_form)

    async def _predict_apart(self, spec: ModelSpec, body: bytes) -> bytes:
        """Do the same as `_predict`, with decoding and encoding in threads, for large bodies."""
        document = await asyncio.to_thread(self._parse, body)
        name = signature_name(document)
        with self._service.lease(spec) as loaded:
            signature = find_signature(loaded.servable, name)
            inputs = await asyncio.to_thread(decode_request, document, signature)
            outputs = await self._service.predict(loaded.servable, signature, inputs.arrays)
        return await asyncio.to_thread(encode_outputs, outputs, signature, inputs.row_form)

    async def _infer(self, spec: ModelSpec, method: Method, body: bytes) -> bytes:
        """Classify or regress. Unlike in predict, the request is decoded before the model is looked up."""
        size = len(body)
        document = await run_sized(size, self._parse, body)
        name = signature_name(document)
        examples = await run_sized(size, decode_examples, document)
        with self._service.lease(spec) as loaded:
            result = await self._service.infer(loaded.servable, name, method, examples)
        return await run_sized(size, encode_result, result)

    def _get(self, match: re.Match[bytes]) -> bytes:
        if match[1] is None:
            raise invalid_argument("Missing model name in request.")
        spec = model_spec(match)
        name_request(spec.name, "")
        # The comparison is case-sensitive: "/METADATA" matches the pattern and is a status request.
        if match[4] == b"metadata":
            return _metadata_json(self._service.metadata(spec))
        return _message({"model_version_status": [version_status(one) for one in self._service.status(spec)]})


def decode_request(document: Document, signature: Signature) -> PredictInputs:
    """Return the inputs of `signature` in a predict request. Ragged lists are padded if the model defines the padding.

    Raises:
        StatusError: an input is missing, unknown, ragged, or of another type.
    """
    try:
        return decode_inputs(document, signature)
    except StatusError:
        padded = pad_ragged(document, signature)
        if padded is None:
            raise
    return decode_inputs(padded, signature)


def _malformed(method: str, target: bytes) -> StatusError:
    return invalid_argument(f"Malformed request: {method} {_text(target)}")


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


@functools.lru_cache(maxsize=1024)  # few URLs take nearly all requests
def find_post(target: bytes) -> tuple[ModelSpec, str] | None:
    """Return the model and the method that a URL names, or None if it is malformed.

    Raises:
        StatusError: the version is not a number.
    """
    match = _POST.fullmatch(target)
    return (model_spec(match), match[4].decode("ascii")) if match else None


def model_spec(match: re.Match[bytes]) -> ModelSpec:
    """Return the model that the first three groups of a URL's match name: name, version, label.

    Raises:
        StatusError: the version is not a number.
    """
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


def find_signature(servable: Servable, name: str) -> Signature:
    """Return the signature that a REST request names, or the default one.

    Raises:
        StatusError: there is no such signature, or it has no inputs.
    """
    signature = servable.signatures.get(name or DEFAULT_SIGNATURE)
    if signature is None:
        raise invalid_argument(f'Serving signature name: "{name or DEFAULT_SIGNATURE}" not found in signature def')
    if not signature.inputs:
        raise invalid_argument(f"Failed to get input map for signature: {name or 'DEFAULT'}")
    return signature


def version_status(status: VersionStatus) -> dict[str, Any]:
    """Return a version in the JSON form of the status API."""
    code, message = (Code.OK, "") if status.error is None else (status.error.code, status.error.message)
    error = {"error_code": code.name, "error_message": message}
    return {"version": str(status.version), "state": status.state.name, "status": error}


def _metadata_json(metadata: ModelMetadata) -> bytes:
    """Return the metadata answer: two messages, combined as in ToJsonString of http_rest_api_util.cc."""
    spec = _message({"name": metadata.name, "signature_name": "", "version": str(metadata.version)})
    signatures = _message({"signature_def": dict(metadata.signature_defs)})
    return b'{\n"model_spec":%b,\n"metadata": {"signature_def": %b}\n}\n' % (spec, signatures)


def _message(value: Any) -> bytes:
    """Return a message in the layout of protobuf's JSON printer."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "replace")
