"""The OpenAPI description of the raw REST routes."""

from typing import Any, Final

from tpuembed_serving.core.servable import State
from tpuembed_serving.core.status import Code

__all__ = ["REST_PATHS", "STATUS_SCHEMA"]

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
_ROW_REQUEST = {
    "type": "object",
    "required": ["instances"],
    "properties": {"signature_name": _SIGNATURE_NAME, "instances": {"type": "array", "minItems": 1, "items": {}}},
}
_COLUMNAR_REQUEST = {
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
        "summary": summary,
        "parameters": parameters,
        "requestBody": {"required": True, "content": {"application/json": {"schema": request, "examples": examples}}},
        "responses": {"200": _json("The outputs of the signature", answer), **_ERRORS, **_RUN_ERRORS},
    }
    return {"post": operation}


def _get(summary: str, parameters: list[dict[str, Any]], answer: dict[str, Any]) -> dict[str, Any]:
    responses = {"200": _json(summary, answer), **_ERRORS}
    return {"get": {"summary": summary, "parameters": parameters, "responses": responses}}


def _paths(base: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        f"{base}:predict": _predict(parameters),
        f"{base}:classify": _infer("Classify tf.Examples: a list of [label, score] for each", parameters),
        f"{base}:regress": _infer("Regress tf.Examples: a number for each", parameters),
        base: _get("The state of the model's versions", parameters, _STATUS_ANSWER),
        f"{base}/metadata": _get("The signatures of the model", parameters, _METADATA_ANSWER),
    }


REST_PATHS: dict[str, Any] = {
    **_paths("/v1/models/{model}", [_MODEL]),
    **_paths("/v1/models/{model}/versions/{version}", [_MODEL, _VERSION]),
    **_paths("/v1/models/{model}/labels/{label}", [_MODEL, _LABEL]),
}
"""OpenAPI path items by path."""
