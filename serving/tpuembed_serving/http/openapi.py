"""The OpenAPI description of the raw REST routes. It has no name of a model, so it is served without a key."""

from collections.abc import Mapping
from typing import Any, Final

from tpuembed_serving.core.servable import State
from tpuembed_serving.core.status import Code
from tpuembed_serving.open_inference.tensors import DTYPES

__all__ = ["HEALTH", "MODELS", "MODELS_ANSWER", "complete_document"]

Json = dict[str, Any]

PREDICT: Final = "predict"
MODELS: Final = "models"
OPEN_INFERENCE: Final = "open inference"
HEALTH: Final = "health"
_TAGS: Final = (
    {"name": PREDICT, "description": "TensorFlow Serving's REST API: predict, classify, regress"},
    {"name": OPEN_INFERENCE, "description": "The Open Inference Protocol of KServe, Triton and MLServer"},
    {"name": MODELS, "description": "Models, versions, signatures, metrics"},
    {"name": HEALTH, "description": "For load balancers and Kubernetes. They need no API key"},
)


def _object(required: Mapping[str, Json], **optional: Json) -> Json:
    return {"type": "object", "required": [*required], "properties": {**required, **optional}}


def _list(items: Json, **more: Any) -> Json:
    return {"type": "array", "items": items, **more}


def _answer(description: str, schema: Json, **more: Any) -> Json:
    return {"description": description, "content": {"application/json": {"schema": schema}}, **more}


def _header(name: str, description: str, schema: Json) -> Json:
    return {name: {"description": description, "required": True, "schema": schema}}


_ANY: Final[Json] = {}
_TEXT: Final[Json] = {"type": "string"}
_FLAG: Final[Json] = {"type": "boolean"}
_SOME: Final[Json] = {"type": "object"}
_NUMBER: Final[Json] = {"type": "string", "pattern": "^[0-9]+$"}
_SIGNATURE: Final[Json] = {"type": "string", "default": "serving_default"}
_PARAMETERS: Final = {
    "model": {"name": "model", "in": "path", "required": True, "schema": _TEXT},
    "version": {
        "name": "version",
        "in": "path",
        "required": True,
        "schema": {"type": "integer", "format": "int64", "minimum": 0},
    },
    "label": {"name": "label", "in": "path", "required": True, "schema": _TEXT},
}

_ROWS: Final = _object({"instances": _list(_ANY, minItems=1)}, signature_name=_SIGNATURE)
_COLUMNS: Final = _object({"inputs": _ANY}, signature_name=_SIGNATURE)
_PREDICTIONS: Final = {"oneOf": [_object({"predictions": _list(_ANY)}), _object({"outputs": _ANY})]}
_EXAMPLE: Final = {
    "type": "object",
    "description": 'Feature by name: a string, {"b64": ...}, a number, a boolean, or a list',
}
_EXAMPLES: Final = _object({"examples": _list(_EXAMPLE, minItems=1)}, signature_name=_SIGNATURE, context=_EXAMPLE)
_RESULTS: Final = _object({"results": _list(_ANY)})
_RPC_STATUS: Final = _object({"error_code": {"enum": [code.name for code in Code]}, "error_message": _TEXT})
_VERSIONS: Final = _list(
    _object({"version": _NUMBER, "state": {"enum": [state.name for state in State]}, "status": _RPC_STATUS})
)
_STATUS: Final = _object({"model_version_status": _VERSIONS})
_METADATA: Final = _object(
    {
        "model_spec": _object({"name": _TEXT, "signature_name": _TEXT, "version": _NUMBER}),
        "metadata": _object({"signature_def": _object({"signature_def": _SOME})}),
    }
)
MODELS_ANSWER: Final = _answer(
    "Every model",
    _object({"models": _list(_object({"name": _TEXT, "labels": _SOME, "model_version_status": _VERSIONS}))}),
)
_SHAPE: Final = _list({"type": "integer", "minimum": -1})
_DATATYPE: Final = {"enum": [*DTYPES]}
_TENSOR: Final = _object(
    {"name": _TEXT, "shape": _list({"type": "integer", "minimum": 0}), "datatype": _DATATYPE},
    parameters=_SOME,
    data=_list(_ANY),
)
_INFERENCE: Final = _object(
    {"inputs": _list(_TENSOR)},
    id=_TEXT,
    parameters=_object({}, signature_name=_SIGNATURE, binary_data_output=_FLAG),
    outputs=_list(_object({"name": _TEXT})),
)
_INFERRED: Final = _object({"model_name": _TEXT, "model_version": _TEXT, "outputs": _list(_TENSOR)}, id=_TEXT)
_TENSORS: Final = _list(_object({"name": _TEXT, "datatype": _DATATYPE, "shape": _SHAPE}))
_MODEL: Final = _object(
    {"name": _TEXT, "versions": _list(_TEXT), "platform": _TEXT, "inputs": _TENSORS, "outputs": _TENSORS},
    properties=_SOME,
)
_SERVER: Final = _object({"name": _TEXT, "version": _TEXT, "extensions": _list(_TEXT)})

_ERROR: Final = _object({"error": _TEXT})
_RETRY: Final = _header("Retry-After", "Seconds", {"type": "integer"})
_ERRORS: Final = {
    "400": _answer("The request is malformed, or the model refuses its inputs", _ERROR),
    "401": _answer("The request has no valid API key", _ERROR),
    "404": _answer("No such model or version is available", _ERROR),
    "408": _answer("The request did not arrive completely in time", _ERROR),
    "431": _answer("The request's line and headers are too long", _ERROR),
    "503": _answer("Too many requests are waiting, or too many connections are open", _ERROR, headers=_RETRY),
}
_RUN_ERRORS: Final = {
    "413": _answer("The body is larger than the limit", _ERROR),
    "415": _answer("The body has a Content-Encoding that is not gzip", _ERROR),
    "429": _answer("The model ran out of memory", _ERROR),
    "500": _answer("The model failed", _ERROR),
    "501": _answer("The dtype is not supported", _ERROR),
    "504": _answer("The model did not answer in time", _ERROR),
}
_LISTS: Final = {"instances": [{"user": 1, "watched": [3, 4]}, {"user": 2, "watched": []}]}
_EXAMPLES_OF: Final[Mapping[str, Json]] = {
    "predict": {
        "rows": {"summary": "One object for each example", "value": {"instances": [{"user": 1, "watched": [3, 4]}]}},
        "columns": {"summary": "One list for each input", "value": {"inputs": {"user": [1], "watched": [[3, 4]]}}},
        "lists": {"summary": "Lists of different lengths, for exports with lists of ids", "value": _LISTS},
    },
    "examples": {
        "examples": {"summary": "tf.Examples", "value": {"examples": [{"user": 1, "watched": [3, 4], "country": "NL"}]}}
    },
    "infer": {
        "tensors": {
            "summary": "One tensor for each input; lists of ids are padded with -1",
            "value": {"inputs": [{"name": "watched", "shape": [2, 2], "datatype": "INT64", "data": [3, 4, 5, -1]}]},
        }
    },
}


def _post(tag: str, summary: str, request: Json, answer: Json, examples: str) -> Json:
    content = {"application/json": {"schema": request, "examples": _EXAMPLES_OF[examples]}}
    version = _header("X-Model-Version", "The version that answered", _NUMBER)
    done = _answer("The outputs of the signature", answer, headers=version)
    return {
        "post": {
            "tags": [tag],
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "responses": {"200": done, **_ERRORS, **_RUN_ERRORS},
        }
    }


def _get(tag: str, summary: str, answer: Json, **errors: Json) -> Json:
    """`errors` are by status, with a letter before it."""
    more = {status[1:]: error for status, error in errors.items()}
    return {
        "get": {"tags": [tag], "summary": summary, "responses": {"200": _answer(summary, answer), **_ERRORS, **more}}
    }


def _ready(tag: str, summary: str) -> Json:
    busy = _answer("Not ready, or too many connections are open", _SOME, headers=_RETRY)
    return _get(tag, summary, _object({"ready": _FLAG}), _501=_answer("An API of Triton's", _ERROR), _503=busy)


def _predict(request: Json, summary: str) -> Json:
    return _post(PREDICT, summary, request, _PREDICTIONS, "predict")


def _of_model(choice: str = "") -> Json:
    """Return the routes of a model, or of its version or label, with the IDs predict, predict_version, predict_label."""
    names = ["model", choice] if choice else ["model"]
    inside = f"/{{model}}/{choice}s/{{{choice}}}" if choice else "/{model}"
    infer = _post(OPEN_INFERENCE, "Infer, as in the Open Inference Protocol", _INFERENCE, _INFERRED, "infer")
    infer["post"]["responses"]["200"]["content"]["application/octet-stream"] = {"schema": _TEXT | {"format": "binary"}}
    about = "The inputs and outputs of the model, in the Open Inference Protocol"
    unknown = _answer("A dtype that the protocol cannot carry, or an API of Triton's", _ERROR)
    rows_or_columns = "Predict, by row (instances -> predictions) or by column (inputs -> outputs)"
    labels = "Classify tf.Examples: a list of [label, score] for each"
    found = {
        ("predict", f"/v1/models{inside}:predict"): _predict({"oneOf": [_ROWS, _COLUMNS]}, rows_or_columns),
        ("classify", f"/v1/models{inside}:classify"): _post(PREDICT, labels, _EXAMPLES, _RESULTS, "examples"),
        ("regress", f"/v1/models{inside}:regress"): _post(
            PREDICT, "Regress tf.Examples: a number for each", _EXAMPLES, _RESULTS, "examples"
        ),
        ("status", f"/v1/models{inside}"): _get(MODELS, "The state of the model's versions", _STATUS),
        ("metadata", f"/v1/models{inside}/metadata"): _get(MODELS, "The signatures of the model", _METADATA),
    }
    if choice != "label":
        found |= {
            ("model_metadata", f"/v2/models{inside}"): _get(OPEN_INFERENCE, about, _MODEL, _501=unknown),
            ("model_ready", f"/v2/models{inside}/ready"): _ready(OPEN_INFERENCE, "Whether the model is available"),
            ("model_infer", f"/v2/models{inside}/infer"): infer,
        }
    for (operation_id, _), item in found.items():
        for operation in item.values():
            operation["parameters"] = [_PARAMETERS[name] for name in names]
            operation["operationId"] = f"{operation_id}_{choice}" if choice else operation_id
    return {path: item for (_, path), item in found.items()}


def _of_server(predict_route: str | None) -> Json:
    """Return the routes that name no model."""
    parameters = {**_object({}, signature_name=_TEXT), "type": ["object", "null"], "additionalProperties": False}
    forms = [{**one, "properties": {**one["properties"], "parameters": parameters}} for one in (_ROWS, _COLUMNS)]
    summary = "Predict with the default model, which is the only one or that of --default-model"
    live = "The server answers, in the Open Inference Protocol"
    found = {
        ("predict_default", "/invocations"): _predict({"oneOf": forms}, summary),
        ("server_metadata", "/v2"): _get(OPEN_INFERENCE, "The server, in the Open Inference Protocol", _SERVER),
        ("server_live", "/v2/health/live"): _get(HEALTH, live, _object({"live": _FLAG})),
        ("server_ready", "/v2/health/ready"): _ready(HEALTH, "Every model has an available version"),
    }
    if predict_route is not None:
        found["predict_route", predict_route] = _predict({"oneOf": forms}, summary)
    for (operation_id, _), item in found.items():
        for operation in item.values():
            operation["operationId"] = operation_id
    return {path: item for (_, path), item in found.items()}


def complete_document(schema: Json, *, has_keys: bool, predict_route: str | None = None) -> Json:
    """Return the OpenAPI document of a server: `schema`, of the other routes, with those of the REST API.

    Args:
        schema: of the other routes.
        has_keys: whether requests need an API key.
        predict_route: another path of predict requests for the default model.
    """
    routes = [_of_model(choice) for choice in ("", "version", "label")]
    document = {**schema, "tags": _TAGS, "paths": dict(schema["paths"])}
    for each in (*routes, _of_server(predict_route)):
        document["paths"] |= each
    if has_keys:
        document["security"] = [{"ApiKey": []}, {"Bearer": []}]
        document["components"] = {
            **schema.get("components", {}),
            "securitySchemes": {
                "ApiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
                "Bearer": {"type": "http", "scheme": "bearer"},
            },
        }
        for item in document["paths"].values():
            for operation in item.values():
                if operation["tags"] == [HEALTH]:
                    operation["security"] = []
    return document
