"""What the OpenAPI page says of the raw REST routes."""

from typing import Any

__all__ = ["REST_PATHS"]

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


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


_ERRORS = {
    "400": _json("The request is malformed, or the model refuses its inputs", _ERROR_SCHEMA),
    "404": _json("No such model or version is available", _ERROR_SCHEMA),
}
_RUN_ERRORS = {
    "501": _json("An input's dtype has no JSON form", _ERROR_SCHEMA),
    "503": _json("Too many requests are waiting", _ERROR_SCHEMA),
    "504": _json("The model did not answer in time", _ERROR_SCHEMA),
}


_PREDICT_EXAMPLES = {
    "rows": {"summary": "One object for each example", "value": {"instances": [{"user": 1, "watched": [3, 4]}]}},
    "columns": {
        "summary": "One list for each input",
        "value": {"inputs": {"user": [1, 2], "watched": [[3, 4], [5, 6]]}},
    },
    "lists": {
        "summary": "Lists of different lengths, where an export has lists of ids",
        "value": {"instances": [{"user": 1, "watched": [3, 4]}, {"user": 2, "watched": []}]},
    },
}
_INFER_EXAMPLES = {
    "examples": {"summary": "tf.Examples", "value": {"examples": [{"user": 1, "watched": [3, 4], "country": "NL"}]}}
}


def _predict(parameters: list[dict[str, Any]]) -> dict[str, Any]:
    answer = {"type": "object", "properties": {"predictions": {"type": "array", "items": {}}, "outputs": {}}}
    request = {"oneOf": [_ROW_REQUEST, _COLUMNAR_REQUEST]}
    summary = "Predict, by row (instances -> predictions) or by column (inputs -> outputs)"
    return _post(summary, parameters, request, answer, _PREDICT_EXAMPLES)


def _infer(summary: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    answer = {"type": "object", "properties": {"results": {"type": "array", "items": {}}}}
    return _post(summary, parameters, _EXAMPLES_REQUEST, answer, _INFER_EXAMPLES)


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


def _get(summary: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    answer = {"200": _json(summary, {"type": "object"}), **_ERRORS}
    return {"get": {"summary": summary, "parameters": parameters, "responses": answer}}


def _paths(base: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        f"{base}:predict": _predict(parameters),
        f"{base}:classify": _infer("Classify tf.Examples: a list of [label, score] for each", parameters),
        f"{base}:regress": _infer("Regress tf.Examples: a number for each", parameters),
        base: _get("The state of the model's versions", parameters),
        f"{base}/metadata": _get("The signatures of the model", parameters),
    }


def _binary(base: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    frame = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    operation = {
        "summary": "Predict with arrays as bytes (docs/serve.md has the format, tpuembed_serving.client speaks it)",
        "parameters": parameters,
        "requestBody": {"required": True, "content": frame},
        "responses": {
            "200": {"description": "The outputs of the signature", "content": frame},
            **_ERRORS,
            **_RUN_ERRORS,
        },
    }
    return {f"/binary{base}:predict": {"post": operation}}


REST_PATHS: dict[str, Any] = {
    **_paths("/v1/models/{model}", [_MODEL]),
    **_paths("/v1/models/{model}/versions/{version}", [_MODEL, _VERSION]),
    **_paths("/v1/models/{model}/labels/{label}", [_MODEL, _LABEL]),
    **_binary("/v1/models/{model}", [_MODEL]),
    **_binary("/v1/models/{model}/versions/{version}", [_MODEL, _VERSION]),
    **_binary("/v1/models/{model}/labels/{label}", [_MODEL, _LABEL]),
}
"""Path -> path item, as OpenAPI has them."""
