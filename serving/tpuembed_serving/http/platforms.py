"""Routes of platforms that host one model: their requests name none. SageMaker's are fixed, Vertex AI's are given."""

from typing import Final

from tpuembed_serving.core.pipeline import Check, Pipeline
from tpuembed_serving.core.request_record import RequestRecord
from tpuembed_serving.core.service import ModelSpec
from tpuembed_serving.core.status import Code, StatusError, invalid_argument
from tpuembed_serving.http.endpoint import BodyReader, Receive, Reply, Scope
from tpuembed_serving.http.rest import RestPredict, answer_while_connected, method_not_allowed, options_reply
from tpuembed_serving.open_inference.inference import check_parameters

__all__ = ["PING", "DefaultPredict", "PlatformApi"]

PING: Final = "/ping"
_INVOCATIONS: Final = "/invocations"
_PARAMETERS: Final = {"signature_name": str}


class PlatformApi:
    """Answers predict requests for the default model with the pipeline."""

    def __init__(
        self,
        pipeline: Pipeline,
        read: BodyReader,
        default_model: str | None,
        predict_route: str | None,
    ) -> None:
        self._pipeline, self._read = pipeline, read
        self._default_model = default_model
        self.paths = frozenset(path for path in (_INVOCATIONS, predict_route) if path is not None)

    def find_post(self, target: bytes) -> ModelSpec | None:
        """Return the model of a POST request. None if the URL is of another API, or there is no default model."""
        if target.decode("latin-1") not in self.paths:
            return None
        try:
            return ModelSpec(self._model())
        except StatusError:
            return None

    async def answer(self, scope: Scope, receive: Receive, record: RequestRecord | None) -> Reply:
        """Return the answer to a request.

        Raises:
            StatusError: the answer is an error.
        """
        if scope["method"] == "OPTIONS":
            return options_reply(scope)
        if scope["method"] != "POST":
            return method_not_allowed("POST")
        model = self._model()
        if record is not None:
            record.model, record.api = model, "predict"
        prediction = DefaultPredict(ModelSpec(model))
        body = await self._read(scope, receive)
        try:
            content = await answer_while_connected(self._pipeline, prediction, body, receive, record)
            return prediction.reply(content)
        finally:
            self._pipeline.memory.release(body.reserved)

    def _model(self) -> str:
        if self._default_model is not None:
            return self._default_model
        names = sorted(self._pipeline.service.models())
        if not names:
            raise StatusError(Code.NOT_FOUND, "this server has no model yet")
        if len(names) > 1:
            raise invalid_argument(
                f"this URL names no model, and the server has {len(names)}. Start it with --default-model NAME, or send to "
                "/v1/models/NAME:predict"
            )
        return names[0]


class DefaultPredict(RestPredict):
    """A predict request with Vertex AI's `parameters`. They may name the signature, as they do in /v2."""

    def parse(self, body: bytes, check: Check) -> ModelSpec:
        """Parse the JSON."""
        spec = super().parse(body, check)
        parameters = self._document.members.get("parameters")
        if parameters is None:
            return spec
        if not isinstance(parameters, dict):
            raise invalid_argument("the request: parameters is not an object. Send an object, or leave it out")
        check_parameters("the request", parameters, _PARAMETERS)
        if self._name and "signature_name" in parameters:
            raise invalid_argument("signature_name is given twice: in the request, and in its parameters. Send one")
        self._name = self._name or parameters.get("signature_name", "")
        return spec
