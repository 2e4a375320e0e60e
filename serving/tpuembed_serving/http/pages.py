"""Routes that TensorFlow Serving does not have: the list of models, the console and the documentation."""

import functools
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles

from tpuembed_serving.core.service import ModelService
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.http.openapi import MODELS, MODELS_ANSWER
from tpuembed_serving.http.rest import version_status
from tpuembed_serving.http.static import static_file, wants_page

__all__ = ["add_pages"]


def add_pages(app: FastAPI, service: ModelService) -> None:
    """Add /models, the console at /, and /docs to `app`, whose own documentation is off."""

    async def models() -> JSONResponse:
        return JSONResponse({"models": [_model(service, name) for name in service.models()]})

    app.add_api_route(
        "/models",
        models,
        summary="Models with their versions, states and labels",
        responses={200: MODELS_ANSWER},
        operation_id="list_models",
        tags=[MODELS],
    )

    async def root(request: Request) -> Response:
        if wants_page(",".join(request.headers.getlist("accept"))):
            answer = static_file("console.html")
        else:
            # KServe's SDK reads it: InferenceRESTClient.is_server_live of inference_client.py.
            answer = JSONResponse({"status": "alive"}, headers={"Cache-Control": "no-store"})
        answer.headers["Vary"] = "Accept"
        return answer

    app.add_api_route("/", root, methods=["GET", "HEAD"], include_in_schema=False)
    pages = {
        **{f"/console/{name}": name for name in ("console.css", "console.js", "icon.svg")},
        "/docs": "docs.html",
        "/docs/docs.js": "docs.js",
    }
    for path, name in pages.items():
        app.add_api_route(path, functools.partial(static_file, name), include_in_schema=False)
    app.mount("/docs/assets", StaticFiles(packages=[("fastapi_offline", "static")]), name="docs-assets")

    async def document() -> JSONResponse:
        return JSONResponse(app.openapi())

    app.add_api_route("/openapi.json", document, include_in_schema=False)


def _model(service: ModelService, name: str) -> dict[str, Any]:
    try:
        statuses = service.versions(name)
    except StatusError as error:
        return {"name": name, "labels": {}, "model_version_status": [], "error": error.message}
    labels = {label: str(version) for label, version in service.models().get(name, {}).items()}
    return {"name": name, "labels": labels, "model_version_status": [version_status(one) for one in statuses]}
