"""The Open Inference Protocol v2 over HTTP: URLs, status codes, headers. The bodies are in `http.json.inference`."""

import json
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tpuembed_serving.core.pipeline import Check, Pipeline, Task
from tpuembed_serving.core.request_record import RequestRecord
from tpuembed_serving.core.servable import Array, LoadedVersion
from tpuembed_serving.core.service import ModelSpec
from tpuembed_serving.core.status import Code, StatusError, invalid_argument
from tpuembed_serving.http.endpoint import (
    HTTP_STATUS,
    BodyReader,
    Receive,
    Reply,
    Scope,
    answer_headers,
    header,
    raw_path,
)
from tpuembed_serving.http.json import (
    LEAST_DECODING_BYTES,
    decoding_bytes,
    encode_inference,
    parse_inference,
)
from tpuembed_serving.http.rest import answer_while_connected, method_not_allowed, options_reply
from tpuembed_serving.open_inference.inference import Inference, model_spec
from tpuembed_serving.open_inference.metadata import is_ready, model_metadata, server_metadata

__all__ = ["HEADER_BYTES", "OpenInferenceApi", "RestInfer", "find_infer", "parse_header_bytes"]

HEADER_BYTES: Final = b"inference-header-content-length"
"""The header with the size of the JSON, in requests and answers with binary tensors."""
_MODEL: Final = re.compile(rb"/v2/models/([^/]+)(?:/versions/([^/]+))?(?:/(ready|infer))?")
_UNSUPPORTED: Final = re.compile(
    rb"/v2/(?:(systemsharedmemory|cudasharedmemory|repository|trace|logging)(?:/.*)?"
    rb"|models/(?:[^/]+/(?:versions/[^/]+/)?)?(config|generate|generate_stream|stats|trace)(?:/.*)?)"
)
"""What Triton adds to the protocol. The name of the API is in one of the groups."""
_SERVER_PATHS: Final = frozenset({b"/v2", b"/v2/", b"/v2/health/live", b"/v2/health/ready"})
_MOST_DIGITS: Final = 20
_BINARY: Final = b"application/octet-stream"


class RestInfer(Inference):
    """An inference request; see `core.pipeline.Prediction`."""

    output_bytes = 40
    """A number of an answer is text of up to 25 bytes, in a list of 15 more. See `decode` for binary ones."""

    def __init__(self, spec: ModelSpec, header_bytes: int | None) -> None:
        self._spec, self._header_bytes, self.model = spec, header_bytes, spec.name
        self._answer_header_bytes: int | None = None

    def decoding_bytes(self, body: bytes) -> int:
        """Return about how many bytes it takes to parse and decode `body`. Binary numbers are used where they lie."""
        text = body[: self._header_bytes]
        may_have_strings = b"BYTES" in text or b"\\" in text  # an escape may hide the name of the datatype
        return decoding_bytes(text) + (len(body) - len(text)) * (LEAST_DECODING_BYTES if may_have_strings else 1)

    def parse(self, body: bytes, check: Check) -> ModelSpec:
        """Parse the JSON, and find the binary tensors after it."""
        self.request = parse_inference(body, self._header_bytes, self._spec, check)
        return self._spec

    def decode(self, loaded: LoadedVersion, check: Check) -> list[Task]:
        """Return the run of the signature, as `Inference` does."""
        tasks = super().decode(loaded, check)
        if all(map(self.request.is_binary, self.outputs)):
            self.output_bytes = 16  # in the array, and in the body
        return tasks

    def encode(self, loaded: LoadedVersion, outputs: Sequence[Mapping[str, Array]], check: Check) -> bytes:
        """Write the answer's JSON, and the binary tensors after it."""
        found = encode_inference(self.request, loaded.version, self.results(outputs[0]), check)
        self._loaded, self._answer_header_bytes = loaded, found.header_bytes
        return found.body

    def reply(self, body: bytes) -> Reply:
        """Return the answer with this body, of the last `encode`."""
        own = answer_headers(self._loaded.version)
        if self._answer_header_bytes is None:
            return Reply(200, body, headers=own)
        headers = (*own, (HEADER_BYTES, b"%d" % self._answer_header_bytes))
        return Reply(200, body, content_type=_BINARY, headers=headers)


def find_infer(path: bytes) -> ModelSpec | None:
    """Return the model of a URL that takes inference requests, or None."""
    model = _MODEL.fullmatch(path)
    return _spec(model) if model is not None and model[3] == b"infer" else None


def _spec(model: re.Match[bytes]) -> ModelSpec:
    return model_spec(
        *[urllib.parse.unquote_to_bytes(part or b"").decode("utf-8", "surrogateescape") for part in model.groups()[:2]]
    )


def parse_header_bytes(value: bytes) -> int | None:
    """Return the size of the JSON from the value of its header. None if there is none.

    Raises:
        StatusError: INVALID_ARGUMENT, it is not a number.
    """
    if value and not (value.isdigit() and len(value) < _MOST_DIGITS):
        raise invalid_argument("Inference-Header-Content-Length is not a number. Send the size of the JSON")
    return int(value) if value else None


class OpenInferenceApi:
    """Answers requests to /v2 with the pipeline."""

    def __init__(self, pipeline: Pipeline, read: BodyReader, is_ready: Callable[[], bool]) -> None:
        """Answer with `pipeline`. `is_ready` says whether the server is: every model, and no stop has begun."""
        self._pipeline, self._read, self._is_ready = pipeline, read, is_ready

    async def answer(self, scope: Scope, receive: Receive, record: RequestRecord | None) -> Reply:
        """Return the answer to a request.

        Raises:
            StatusError: the answer is an error.
        """
        method, path = scope["method"], raw_path(scope)
        if method == "OPTIONS":
            return options_reply(scope)
        if (found := _UNSUPPORTED.fullmatch(path)) and not self._is_model(path):
            name = (found[1] or found[2]).decode("ascii")
            raise StatusError(
                Code.UNIMPLEMENTED, f"this server has no {name} API of Triton's. Use its own commands and options"
            )
        model = _MODEL.fullmatch(path)
        infers = model is not None and model[3] == b"infer"
        if model is None and path not in _SERVER_PATHS:
            raise StatusError(
                Code.NOT_FOUND, f"/v2 has no {path.decode('ascii', 'replace')}. See docs/serve-reference.md"
            )
        if method != ("POST" if infers else "GET"):
            return method_not_allowed("POST" if infers else "GET")
        if model is None:
            return self._server(path)
        spec = _spec(model)
        if record is not None:
            record.model = spec.name
        if infers:
            return await self._infer(spec, scope, receive, record)
        return await self._model(spec, wants_ready=model[3] is not None)

    def _is_model(self, path: bytes) -> bool:
        """Returns True if a path of Triton's names a model of this server: one that is called stats, for example."""
        model = _MODEL.fullmatch(path)
        return (
            model is not None
            and urllib.parse.unquote_to_bytes(model[1]).decode("utf-8", "replace") in self._pipeline.service.models()
        )

    def _server(self, path: bytes) -> Reply:
        if path == b"/v2/health/live":
            return _json({"live": True})
        if path == b"/v2/health/ready":
            return _ready({}, self._is_ready())
        return _json(server_metadata())

    async def _model(self, spec: ModelSpec, *, wants_ready: bool) -> Reply:
        service = self._pipeline.service
        if wants_ready:
            return _ready({"name": spec.name}, await is_ready(service, spec))
        return _json(await model_metadata(service, spec))

    async def _infer(self, spec: ModelSpec, scope: Scope, receive: Receive, record: RequestRecord | None) -> Reply:
        if record is not None:
            record.api = "infer"
        prediction = RestInfer(spec, parse_header_bytes(header(scope, HEADER_BYTES)))
        body = await self._read(scope, receive)
        try:
            content = await answer_while_connected(self._pipeline, prediction, body, receive, record)
        finally:
            self._pipeline.memory.release(body.reserved)
        return prediction.reply(content)


def _json(value: Any, code: Code = Code.OK) -> Reply:
    text = json.dumps(value, ensure_ascii=False)
    return Reply(HTTP_STATUS[code], text.encode("utf-8", "replace"), code)


def _ready(about: dict[str, Any], is_ready: bool) -> Reply:
    return _json(about | {"ready": is_ready}, Code.OK if is_ready else Code.UNAVAILABLE)
