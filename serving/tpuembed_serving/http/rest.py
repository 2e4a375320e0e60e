"""TensorFlow Serving's REST API under /v1/: URLs, status codes, bodies."""

import asyncio
import functools
import json
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from tpuembed_serving.core.classify_regress import LOG_TYPES, Method, example_task, find_signature, interpret
from tpuembed_serving.core.pipeline import Check, Pipeline, Prediction, Task
from tpuembed_serving.core.request_record import RequestRecord
from tpuembed_serving.core.servable import Array, LoadedVersion, Servable, Signature, VersionStatus
from tpuembed_serving.core.service import DEFAULT_SIGNATURE, ModelMetadata, ModelSpec
from tpuembed_serving.core.status import Code, StatusError, invalid_argument
from tpuembed_serving.http.endpoint import (
    HTTP_STATUS,
    Body,
    BodyReader,
    ClientLeftError,
    Receive,
    Reply,
    Scope,
    answer_headers,
    header,
    raw_target,
)
from tpuembed_serving.http.json import (
    Document,
    PredictInputs,
    decode_examples,
    decode_inputs,
    decoding_bytes,
    encode_error,
    encode_outputs,
    encode_result,
    pad_ragged,
    parse_document,
    signature_name,
)
from tpuembed_serving.models.versions import parse_version

__all__ = [
    "HTTP_STATUS",
    "RestApi",
    "RestInference",
    "RestPredict",
    "answer_while_connected",
    "find_post",
    "method_not_allowed",
    "options_reply",
    "version_status",
]


_MODEL = rb"/([^/:?]+)"  # a query never matches
_CHOICE = rb"(?:(?:/versions/([0-9]+))|(?:/labels/([^/:?]+)))?"
_POST = re.compile(rb"(?i)/v1/models" + _MODEL + _CHOICE + rb":(classify|regress|predict)")
_GET = re.compile(rb"(?i)/v1/models(?:" + _MODEL + rb")?" + _CHOICE + rb"(?:/(metadata))?")
_INFERENCE = {"classify": Method.CLASSIFY, "regress": Method.REGRESS}
_ORIGIN = re.compile(rb"https?://")


class _RestPrediction:
    """The size of JSON, and the answer; see `core.pipeline.Prediction`."""

    _loaded: LoadedVersion

    output_bytes = 40
    """A number of an answer is text of up to 25 bytes, in a list of 15 more."""
    log_type = "predict_log"
    is_log_message = False

    def __init__(self, spec: ModelSpec) -> None:
        self._spec, self.model = spec, spec.name

    def decoding_bytes(self, body: bytes) -> int:
        """Return about how many bytes it takes to parse and decode `body`."""
        return decoding_bytes(body)

    def reply(self, body: bytes) -> Reply:
        """Return the answer with this body, of the last `encode`."""
        return Reply(200, body, headers=answer_headers(self._loaded.version))


class RestPredict(_RestPrediction):
    """A predict request; see `core.pipeline.Prediction`."""

    def parse(self, body: bytes, check: Check) -> ModelSpec:
        """Parse the JSON."""
        self._document = parse_document(body, check)
        self._name = signature_name(self._document)
        return self._spec

    def decode(self, loaded: LoadedVersion, check: Check) -> list[Task]:
        """Convert the inputs to arrays. Ragged lists are padded if the model defines the padding."""
        self._signature = signature = _find_signature(loaded.servable, self._name)
        inputs = _decode(self._document, signature, check)
        self._row_form = inputs.row_form
        return [Task(signature, inputs.arrays)]

    def encode(self, loaded: LoadedVersion, outputs: Sequence[Mapping[str, Array]], check: Check) -> bytes:
        """Write the outputs in the form of the inputs: rows or columns."""
        self._loaded = loaded
        return encode_outputs(outputs[0], self._signature, self._row_form, check)


class RestInference(_RestPrediction):
    """A classify or regress request; see `core.pipeline.Prediction`."""

    def __init__(self, spec: ModelSpec, method: Method) -> None:
        super().__init__(spec)
        self._method, self.log_type = method, LOG_TYPES[method]

    def parse(self, body: bytes, check: Check) -> ModelSpec:
        """Parse the JSON. Unlike in predict, the request is decoded before the model is looked up."""
        document = parse_document(body, check)
        self._name = signature_name(document) or DEFAULT_SIGNATURE
        self._examples = decode_examples(document, check)
        return self._spec

    def decode(self, loaded: LoadedVersion, _: Check) -> list[Task]:
        """Return the run of the examples."""
        self._signature = find_signature(loaded.servable, self._name, self._method)
        return [example_task(self._signature, self._examples)]

    def encode(self, loaded: LoadedVersion, outputs: Sequence[Mapping[str, Array]], _: Check) -> bytes:
        """Write the classes or values."""
        self._loaded = loaded
        return encode_result(interpret(self._method, self._signature, outputs[0], len(self._examples)))


class RestApi:
    """Answers requests to /v1/ with the pipeline."""

    def __init__(self, pipeline: Pipeline, read: BodyReader) -> None:
        self._pipeline, self._read = pipeline, read

    async def answer(self, scope: Scope, receive: Receive, record: RequestRecord | None) -> Reply:
        """Return the answer to a request.

        Raises:
            StatusError: the answer is an error.
        """
        method, target = scope["method"], raw_target(scope)
        if method == "POST" and (found := find_post(target)):
            spec, api = found
            if record is not None:
                record.model, record.api = spec.name, api
            body = await self._read(scope, receive)
            try:
                prediction = self._prediction(spec, api)
                if prediction is not None:
                    content = await answer_while_connected(self._pipeline, prediction, body, receive, record)
                    return prediction.reply(content)
            finally:
                self._pipeline.memory.release(body.reserved)
        elif method == "GET" and (match := _GET.fullmatch(target)):
            return Reply(200, await self._get(match, record))
        elif method == "OPTIONS":
            return options_reply(scope)
        raise invalid_argument(f"Malformed request: {method} {_text(target)}")

    def _prediction(self, spec: ModelSpec, api: str) -> RestPredict | RestInference | None:
        """Return the request of an API. None if its name is not in lower case, as the URL pattern allows."""
        if api == "predict":
            return RestPredict(spec)
        return RestInference(spec, _INFERENCE[api]) if api in _INFERENCE else None

    async def _get(self, match: re.Match[bytes], record: RequestRecord | None) -> bytes:
        if match[1] is None:
            raise invalid_argument("Missing model name in request.")
        spec, service = model_spec(match), self._pipeline.service
        if record is not None:
            record.model = spec.name
        # The comparison is case-sensitive: "/METADATA" matches the pattern and is a status request.
        if match[4] == b"metadata":
            return _metadata_json(await service.metadata(spec))
        return _message({"model_version_status": [version_status(one) for one in service.status(spec)]})


async def answer_while_connected(
    pipeline: Pipeline, prediction: Prediction, body: Body, receive: Receive, record: RequestRecord | None
) -> bytes:
    """Return the answer to a prediction. Its work stops if the client disconnects.

    Raises:
        StatusError: the answer is an error.
        ClientLeftError: the client disconnected.
    """
    work = pipeline.answer(prediction, body.content, record, reserved=body.reserved)
    answer = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientLeftError
        return answer.result()
    finally:
        leaving.cancel()
        answer.cancel()


def options_reply(scope: Scope) -> Reply:
    """Return the answer to OPTIONS, which a page of another site sends before its request."""
    code = Code.OK if _ORIGIN.search(header(scope, b"origin")) else Code.FAILED_PRECONDITION
    return Reply(HTTP_STATUS[code], b"", code)


def method_not_allowed(method: str) -> Reply:
    """Return the answer to a request of another method than `method`, the only one of its URL."""
    body = encode_error(f"this URL takes {method} requests only")
    return Reply(405, body, Code.UNIMPLEMENTED, headers=((b"allow", method.encode("ascii")),))


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _decode(document: Document, signature: Signature, check: Check) -> PredictInputs:
    try:
        return decode_inputs(document, signature, check)
    except StatusError:
        padded = pad_ragged(document, signature, check)
        if padded is None:
            raise
    return decode_inputs(padded, signature, check)


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


def _find_signature(servable: Servable, name: str) -> Signature:
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
