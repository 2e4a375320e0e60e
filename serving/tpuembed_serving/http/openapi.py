"""The OpenAPI description of the raw REST routes."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tpuembed_serving.core.servable import State
from tpuembed_serving.core.status import Code
from tpuembed_serving.open_inference.tensors import DTYPES

__all__ = ["HEALTH", "MODELS", "REST_PATHS", "STATUS_SCHEMA", "complete_document"]

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

_MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
_VERSION = {
    "name": "version",
    "in": "path",
    "required": True,
    "schema": {"type": "integer", "format": "int64", "minimum": 0},
}
_LABEL = {"name": "label", "in": "path", "required": True, "schema": {"type": "string"}}
_SIGNATURE_NAME = {"type": "string", "default": "serving_default"}
_ERROR_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_ROW_REQUEST: dict[str, Any] = {
    "type": "object",
    "required": ["instances"],
    "properties": {"signature_name": _SIGNATURE_NAME, "instances": {"type": "array", "minItems": 1, "items": {}}},
}
_COLUMNAR_REQUEST: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "properties": {"signature_name": _SIGNATURE_NAME, "inputs": {}},
}
_EXAMPLE = {"type": "object", "description": 'Feature by name: a string, {"b64": ...}, a number, a boolean, or a list'}
_EXAMPLES_REQUEST = {
    "type": "object",
    "required": ["examples"],
    "properties": {
        "signature_name": _SIGNATURE_NAME,
        "context": _EXAMPLE,
        "examples": {"type": "array", "minItems": 1, "items": _EXAMPLE},
    },
}


_RPC_STATUS = {
    "type": "object",
    "required": ["error_code", "error_message"],
    "properties": {"error_code": {"enum": [code.name for code in Code]}, "error_message": {"type": "string"}},
}
STATUS_SCHEMA: Final[dict[str, Any]] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["version", "state", "status"],
        "properties": {
            "version": {"type": "string", "pattern": "^[0-9]+$"},
            "state": {"enum": [state.name for state in State]},
            "status": _RPC_STATUS,
        },
    },
}
"""The schema of the versions of a model."""
_STATUS_ANSWER = {
    "type": "object",
    "required": ["model_version_status"],
    "properties": {"model_version_status": STATUS_SCHEMA},
}
_METADATA_ANSWER = {
    "type": "object",
    "required": ["model_spec", "metadata"],
    "properties": {
        "model_spec": {
            "type": "object",
            "required": ["name", "signature_name", "version"],
            "properties": {
                "name": {"type": "string"},
                "signature_name": {"type": "string"},
                "version": {"type": "string", "pattern": "^[0-9]+$"},
            },
        },
        "metadata": {
            "type": "object",
            "required": ["signature_def"],
            "properties": {
                "signature_def": {
                    "type": "object",
                    "required": ["signature_def"],
                    "properties": {"signature_def": {"type": "object", "additionalProperties": {"type": "object"}}},
                }
            },
        },
    },
}
_PREDICT_ANSWER = {
    "oneOf": [
        {"type": "object", "required": ["predictions"], "properties": {"predictions": {"type": "array", "items": {}}}},
        {"type": "object", "required": ["outputs"], "properties": {"outputs": {}}},
    ]
}
_RESULTS_ANSWER = {
    "type": "object",
    "required": ["results"],
    "properties": {"results": {"type": "array", "items": {}}},
}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds", "required": True, "schema": {"type": "integer"}}}


_VERSION_HEADER: Final = {
    "X-Model-Version": {
        "description": "The version that answered",
        "required": True,
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    }
}


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _error(description: str) -> dict[str, Any]:
    return _json(description, _ERROR_SCHEMA)


_ERRORS = {
    "400": _error("The request is malformed, or the model refuses its inputs"),
    "401": _error("The request has no valid API key"),
    "404": _error("No such model or version is available"),
    "408": _error("The request did not arrive completely in time"),
    "431": _error("The request's line and headers are too long"),
    "503": _error("Too many requests are waiting, or too many connections are open") | {"headers": _RETRY_AFTER},
}
_RUN_ERRORS = {
    "413": _error("The body is larger than the limit"),
    "415": _error("The body has a Content-Encoding that is not gzip"),
    "429": _error("The model ran out of memory"),
    "500": _error("The model failed"),
    "501": _error("The dtype is not supported"),
    "504": _error("The model did not answer in time"),
}


_PREDICT_EXAMPLES = {
    "rows": {"summary": "One object for each example", "value": {"instances": [{"user": 1, "watched": [3, 4]}]}},
    "columns": {
        "summary": "One list for each input",
        "value": {"inputs": {"user": [1, 2], "watched": [[3, 4], [5, 6]]}},
    },
    "lists": {
        "summary": "Lists of different lengths, for exports with lists of ids",
        "value": {"instances": [{"user": 1, "watched": [3, 4]}, {"user": 2, "watched": []}]},
    },
}
_INFER_EXAMPLES = {
    "examples": {"summary": "tf.Examples", "value": {"examples": [{"user": 1, "watched": [3, 4], "country": "NL"}]}}
}


def _predict(parameters: list[dict[str, Any]]) -> dict[str, Any]:
    request = {"oneOf": [_ROW_REQUEST, _COLUMNAR_REQUEST]}
    summary = "Predict, by row (instances -> predictions) or by column (inputs -> outputs)"
    return _post(summary, parameters, request, _PREDICT_ANSWER, _PREDICT_EXAMPLES)


def _infer(summary: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    return _post(summary, parameters, _EXAMPLES_REQUEST, _RESULTS_ANSWER, _INFER_EXAMPLES)


def _post(
    summary: str,
    parameters: list[dict[str, Any]],
    request: dict[str, Any],
    answer: dict[str, Any],
    examples: dict[str, Any],
) -> dict[str, Any]:
    operation = {
        "tags": [PREDICT],
        "summary": summary,
        "parameters": parameters,
        "requestBody": {"required": True, "content": {"application/json": {"schema": request, "examples": examples}}},
        "responses": {
            "200": {**_json("The outputs of the signature", answer), "headers": _VERSION_HEADER},
            **_ERRORS,
            **_RUN_ERRORS,
        },
    }
    return {"post": operation}


def _get(summary: str, parameters: list[dict[str, Any]], answer: dict[str, Any]) -> dict[str, Any]:
    responses = {"200": _json(summary, answer), **_ERRORS}
    return {"get": {"tags": [MODELS], "summary": summary, "parameters": parameters, "responses": responses}}


def _paths(base: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    found = {
        f"{base}:predict": _predict(parameters),
        f"{base}:classify": _infer("Classify tf.Examples: a list of [label, score] for each", parameters),
        f"{base}:regress": _infer("Regress tf.Examples: a number for each", parameters),
        base: _get("The state of the model's versions", parameters, _STATUS_ANSWER),
        f"{base}/metadata": _get("The signatures of the model", parameters, _METADATA_ANSWER),
    }
    for path, item in found.items():
        name = path.rpartition(":")[2] if ":" in path else "metadata" if path.endswith("/metadata") else "status"
        _name(item, name, parameters)
    return found


def _name(item: dict[str, Any], name: str, parameters: list[dict[str, Any]]) -> None:
    """Give the one operation of `item` its ID: predict, predict_version, predict_label."""
    (operation,) = item.values()
    operation["operationId"] = name + "".join(f"_{one['name']}" for one in parameters[1:])


_DATATYPES = [*DTYPES]
_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"enum": _DATATYPES},
        "parameters": {"type": "object"},
        "data": {"type": "array", "items": {}},
    },
}
_INFERENCE_REQUEST = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "parameters": {
            "type": "object",
            "properties": {"signature_name": _SIGNATURE_NAME, "binary_data_output": {"type": "boolean"}},
        },
        "inputs": {"type": "array", "items": _TENSOR},
        "outputs": {
            "type": "array",
            "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
        },
    },
}
_INFERENCE_ANSWER = {
    "type": "object",
    "required": ["model_name", "model_version", "outputs"],
    "properties": {
        "model_name": {"type": "string"},
        "model_version": {"type": "string"},
        "id": {"type": "string"},
        "outputs": {"type": "array", "items": _TENSOR},
    },
}
_TENSOR_METADATA = {
    "type": "object",
    "required": ["name", "datatype", "shape"],
    "properties": {
        "name": {"type": "string"},
        "datatype": {"enum": _DATATYPES},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": -1}},
    },
}
_MODEL_METADATA = {
    "type": "object",
    "required": ["name", "versions", "platform", "inputs", "outputs"],
    "properties": {
        "name": {"type": "string"},
        "versions": {"type": "array", "items": {"type": "string"}},
        "platform": {"type": "string"},
        "inputs": {"type": "array", "items": _TENSOR_METADATA},
        "outputs": {"type": "array", "items": _TENSOR_METADATA},
        "properties": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
_SERVER_METADATA = {
    "type": "object",
    "required": ["name", "version", "extensions"],
    "properties": {
        "name": {"type": "string"},
        "version": {"type": "string"},
        "extensions": {"type": "array", "items": {"type": "string"}},
    },
}
_INFERENCE_EXAMPLES = {
    "tensors": {
        "summary": "One tensor for each input; lists of ids are padded with -1",
        "value": {
            "inputs": [
                {"name": "user", "shape": [2], "datatype": "INT64", "data": [1, 2]},
                {"name": "watched", "shape": [2, 2], "datatype": "INT64", "data": [3, 4, 5, -1]},
            ]
        },
    }
}


def _flag(name: str) -> dict[str, Any]:
    return {"type": "object", "required": [name], "properties": {name: {"type": "boolean"}}}


def _ready(summary: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    operation = _get(summary, parameters, _flag("ready"))
    is_busy = _json("Not ready, or too many connections are open", {"type": "object"}) | {"headers": _RETRY_AFTER}
    operation["get"]["responses"] |= {"501": _error("An API of Triton's"), "503": is_busy}
    return operation


def _open_inference(base: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    infer = _post(
        "Infer, as in the Open Inference Protocol",
        parameters,
        _INFERENCE_REQUEST,
        _INFERENCE_ANSWER,
        _INFERENCE_EXAMPLES,
    )
    binary = {"schema": {"type": "string", "format": "binary"}}
    infer["post"]["responses"]["200"]["content"]["application/octet-stream"] = binary
    metadata = _get("The inputs and outputs of the model, in the Open Inference Protocol", parameters, _MODEL_METADATA)
    metadata["get"]["responses"]["501"] = _error("A dtype that the protocol cannot carry, or an API of Triton's")
    found = {
        base: metadata,
        f"{base}/ready": _ready("Whether the model is available", parameters),
        f"{base}/infer": infer,
    }
    for item, name in zip(found.values(), ("model_metadata", "model_ready", "model_infer"), strict=True):
        _name(item, name, parameters)
        next(iter(item.values()))["tags"] = [OPEN_INFERENCE]
    return found


def _open_inference_server() -> dict[str, Any]:
    live = _get("The server answers, in the Open Inference Protocol", [], _flag("live"))
    ready = _ready("Every model has an available version, in the Open Inference Protocol", [])
    found = {
        "/v2": _get("The server, in the Open Inference Protocol", [], _SERVER_METADATA),
        "/v2/health/live": live,
        "/v2/health/ready": ready,
    }
    for item, name in zip(found.values(), ("server_metadata", "server_live", "server_ready"), strict=True):
        _name(item, name, [])
        next(iter(item.values()))["tags"] = [OPEN_INFERENCE if name == "server_metadata" else HEALTH]
    return found


_OF_DEFAULT: Final = ("predict_default", "predict_route")
"""The IDs of the operations whose URL names no model."""


def _predict_default(operation_id: str) -> dict[str, Any]:
    item = _predict([])
    parameters = {
        "type": ["object", "null"],
        "properties": {"signature_name": {"type": "string"}},
        "additionalProperties": False,
    }
    content = item["post"]["requestBody"]["content"]["application/json"]
    content["schema"] = {
        "oneOf": [
            {**form, "properties": {**form["properties"], "parameters": parameters}}
            for form in (_ROW_REQUEST, _COLUMNAR_REQUEST)
        ]
    }
    item["post"]["summary"] = "Predict with the default model, which is the only one or that of --default-model"
    item["post"]["operationId"] = operation_id
    return item


REST_PATHS: dict[str, Any] = {
    **_paths("/v1/models/{model}", [_MODEL]),
    **_paths("/v1/models/{model}/versions/{version}", [_MODEL, _VERSION]),
    **_paths("/v1/models/{model}/labels/{label}", [_MODEL, _LABEL]),
    "/invocations": _predict_default(_OF_DEFAULT[0]),
    **_open_inference_server(),
    **_open_inference("/v2/models/{model}", [_MODEL]),
    **_open_inference("/v2/models/{model}/versions/{version}", [_MODEL, _VERSION]),
}
"""OpenAPI path items by path."""


def complete_document(
    schema: Mapping[str, Any],
    models: Sequence[str],
    examples: Mapping[str, Any],
    *,
    has_keys: bool,
    default_model: str | None = None,
    predict_route: str | None = None,
) -> dict[str, Any]:
    """Return the OpenAPI document of a server: `schema` with the REST API of these models.

    Args:
        schema: of the other routes.
        models: the names of the models, which `model` is one of.
        examples: by model, a predict request that it answers; in place of invented ones.
        has_keys: whether requests need an API key.
        default_model: the model of requests whose URL names none, if there is one.
        predict_route: another path of predict requests for the default model.
    """
    document = copy.deepcopy({**schema, "tags": _TAGS})
    document["paths"].update(copy.deepcopy(REST_PATHS))
    if predict_route is not None:
        document["paths"][predict_route] = _predict_default(_OF_DEFAULT[1])
    for item in document["paths"].values():
        for operation in item.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model" and models:
                    parameter["schema"]["enum"] = list(models)
            if operation["operationId"].startswith("predict"):
                has_default = operation["operationId"] in _OF_DEFAULT
                found = {
                    name: {"summary": f"model {name}", "value": value}
                    for name, value in examples.items()
                    if not has_default or name == default_model
                }
                if found:
                    operation["requestBody"]["content"]["application/json"]["examples"] = found
            if has_keys and operation["tags"] == [HEALTH]:
                operation["security"] = []
    if has_keys:
        document["security"] = [{"ApiKey": []}, {"Bearer": []}]
        document.setdefault("components", {})["securitySchemes"] = {
            "ApiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            "Bearer": {"type": "http", "scheme": "bearer"},
        }
    return document
