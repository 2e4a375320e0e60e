"""Routes that TensorFlow Serving does not have: the list of models, and the documentation."""

import asyncio
import functools
import importlib.util
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles

from tpuembed_serving.core.service import ModelService
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.http.openapi import HEALTH, MODELS, STATUS_SCHEMA
from tpuembed_serving.http.rest import version_status
from tpuembed_serving.http.static import DOCS, page_headers, static_file

__all__ = ["HEALTH", "MODELS", "add_pages"]

_ASSETS: Final = "/docs/assets"
_MODELS: Final = {
    "type": "object",
    "required": ["models"],
    "properties": {
        "models": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "labels", "model_version_status"],
                "properties": {
                    "name": {"type": "string"},
                    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                    "model_version_status": STATUS_SCHEMA,
                },
            },
        }
    },
    "example": {
        "models": [
            {
                "name": "movies",
                "labels": {"stable": "3"},
                "model_version_status": [
                    {"version": "3", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
                ],
            }
        ]
    },
}


def add_pages(app: FastAPI, service: ModelService) -> None:
    """Add /models and /docs to `app`, whose own documentation is off."""

    async def models() -> JSONResponse:
        return JSONResponse({"models": [_model(service, name) for name in service.models()]})

    answer: dict[int | str, dict[str, Any]] = {
        200: {"description": "Every model", "content": {"application/json": {"schema": _MODELS}}}
    }
    app.add_api_route(
        "/models",
        models,
        summary="Models with their versions, states and labels",
        responses=answer,
        operation_id="list_models",
        tags=[MODELS],
    )

    async def document() -> JSONResponse:
        return JSONResponse(await asyncio.to_thread(app.openapi), headers=page_headers("no-store"))

    app.add_api_route("/openapi.json", document, include_in_schema=False)
    app.add_api_route("/docs", _docs(app), include_in_schema=False)


def _model(service: ModelService, name: str) -> dict[str, Any]:
    try:
        statuses = service.versions(name)
    except StatusError as error:
        return {"name": name, "labels": {}, "model_version_status": [], "error": error.message}
    labels = {label: str(version) for label, version in service.models().get(name, {}).items()}
    return {"name": name, "labels": labels, "model_version_status": [version_status(one) for one in statuses]}


def _docs(app: FastAPI) -> Any:
    """Return the route of the page. Without fastapi-offline, it loads Swagger UI from a CDN, and asks for no key."""
    assets = _assets()
    if assets is not None:
        app.mount(_ASSETS, StaticFiles(directory=assets), name="docs-assets")
        for name in DOCS:
            app.add_api_route(f"/docs/{name}", functools.partial(static_file, name), include_in_schema=False)

    async def docs() -> Response:
        if assets is None:
            return get_swagger_ui_html(openapi_url="openapi.json", title=app.title)
        return static_file("docs.html")

    return docs


def _assets() -> Path | None:
    """Return the folder of Swagger UI in fastapi-offline, or None if it is not installed."""
    found = importlib.util.find_spec("fastapi_offline")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "static"
    return folder if (folder / "swagger-ui-bundle.js").is_file() else None
