"""The console: a static page for browsers at `/`, and the data that it shows. It only reads."""

import asyncio
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastapi import Request
from fastapi.responses import JSONResponse, Response

import tpuembed
from tpuembed.errors import ConfigError
from tpuembed.files import FilePath
from tpuembed.manifest import MANIFEST_PATH, Manifest
from tpuembed_serving.core.servable import Servable, VersionProgress, VersionStatus
from tpuembed_serving.core.service import DEFAULT_SIGNATURE
from tpuembed_serving.core.status import StatusError, invalid_argument
from tpuembed_serving.core.traffic import SLOT_SECONDS, summarize
from tpuembed_serving.http.endpoint import HTTP_STATUS
from tpuembed_serving.http.example_requests import signature_example
from tpuembed_serving.http.static import CONSOLE, page_headers, static_file, wants_page
from tpuembed_serving.models.versions import GRAPH_FILE, parse_version

if TYPE_CHECKING:
    from tpuembed_serving.http.app import ServingApp

__all__ = ["add_console"]

_TRAFFIC: Final = "traffic"
"""The topic of a question for the counts of a process."""
_METHODS: Final = {"tensorflow/serving/classify": "classify", "tensorflow/serving/regress": "regress"}
_TENSORFLOWS_OWN: Final = "__saved_model_"
"""How the names of signatures begin that TensorFlow adds: no client calls them."""


def add_console(app: "ServingApp") -> None:
    """Add `/`, and the console's files and data unless the settings turn it off."""
    has_console = app.settings.console

    async def root(request: Request) -> Response:
        if has_console and wants_page(",".join(request.headers.getlist("accept"))):
            answer = static_file("console.html")
        else:
            # KServe's SDK reads it: InferenceRESTClient.is_server_live of inference_client.py.
            answer = JSONResponse({"status": "alive"}, headers=page_headers("no-store"))
        answer.headers["Vary"] = "Accept"
        return answer

    app.add_api_route("/", root, methods=["GET", "HEAD"], include_in_schema=False)
    if not has_console:
        return
    for name in CONSOLE:
        app.add_api_route(f"/console/{name}", functools.partial(static_file, name), include_in_schema=False)
    data = _Data(app)

    async def state() -> Response:
        return await _answer(data.state)

    async def signatures(model: str, version: str) -> Response:
        return await _answer(functools.partial(data.signatures, model, version))

    app.add_api_route("/console/state", state, include_in_schema=False)
    app.add_api_route("/console/signatures", signatures, include_in_schema=False)


async def _answer(read: Callable[[], Any]) -> Response:
    """Return what `read` returns, which runs in a thread: it asks other processes, and reads files."""
    headers = page_headers("no-store")
    try:
        return JSONResponse(await asyncio.to_thread(read), headers=headers)
    except StatusError as error:
        return JSONResponse({"error": error.message}, HTTP_STATUS[error.code], headers=headers)


class _Data:
    """The data of the page, of all processes of the server."""

    def __init__(self, app: "ServingApp") -> None:
        self._app, self._started = app, time.monotonic()
        app.worker_group.register(_TRAFFIC, lambda _: self._traffic())

    def _traffic(self) -> dict[str, Any]:
        executor = self._app.runs_here
        return {
            "models": self._app.pipeline.traffic.snapshot(),
            "waiting": 0 if executor is None else executor.waiting,
            "seconds": time.monotonic() - self._started,
        }

    def state(self) -> dict[str, Any]:
        """Return the server, its models, their versions and their figures."""
        app, settings, service = self._app, self._app.settings, self._app.pipeline.service
        parts = app.worker_group.gather(_TRAFFIC)
        traffic, labels = summarize(part["models"] for part in parts), service.models()
        models = app.repository
        progress = [] if app.local is None else app.local.group_progress()
        return {
            "server": {
                "version": tpuembed.__version__,
                "workers": settings.workers,
                "answering": len(parts),
                "seconds": max(part["seconds"] for part in parts),
                "ready": models.ready and not app.leaving,
                "stopping": app.leaving,
                "waiting": sum(part["waiting"] for part in parts),
                "most_waiting": settings.max_queued_requests * settings.workers,
                "grpc_port": settings.grpc_port,
                "tls": settings.security.tls is not None,
                "keys": settings.security.api_keys is not None,
                "target": settings.target,
                "slot_seconds": SLOT_SECONDS,
            },
            "models": [
                {
                    "name": name,
                    "labels": {label: str(version) for label, version in labels[name].items()},
                    "traffic": traffic.get(name),
                    **self._versions(name, [one for one in progress if one.model == name]),
                }
                for name in sorted(labels)
            ],
            "others": sum(figures["answers"] for name, figures in traffic.items() if name not in labels),
        }

    def _versions(self, name: str, progress: list[VersionProgress]) -> dict[str, Any]:
        try:
            statuses = self._app.pipeline.service.versions(name)
        except StatusError as error:
            return {"versions": [], "error": error.message}
        return {"versions": [_version(status, progress) for status in statuses]}

    def signatures(self, model: str, version: str) -> dict[str, Any]:
        """Return the signatures of a loaded version, each with an example request.

        Raises:
            StatusError: it is not loaded, or `version` is no number.
        """
        number, models = parse_version(version), self._app.repository
        if number is None:
            raise invalid_argument(f"version is {version!r}. Give a number")
        progress = [] if self._app.local is None else self._app.local.progress()
        paths = {(one.model, one.version): one.path for one in progress if isinstance(one.path, Path)}
        with models.lease(model, number) as loaded:
            return {"signatures": list(_signatures(loaded.servable, paths.get((model, number))))}


def _signatures(servable: Servable, path: Path | None) -> Iterator[dict[str, Any]]:
    names = [name for name in servable.signatures if not name.startswith(_TENSORFLOWS_OWN)]
    for name in sorted(names, key=lambda name: (name != DEFAULT_SIGNATURE, name)):
        signature, definition = servable.signatures[name], servable.signature_defs.get(name, {})
        yield {
            "name": name,
            "method": _METHODS.get(definition.get("method_name", ""), "predict"),
            "inputs": [
                {"name": info.alias, "dtype": info.dtype, "shape": _shape(definition, "inputs", info.alias)}
                for info in signature.inputs
            ],
            "outputs": [
                {"name": info.alias, "dtype": info.dtype, "shape": _shape(definition, "outputs", info.alias)}
                for info in signature.outputs
            ],
            "example": signature_example(servable, path, name),
        }


def _shape(definition: Mapping[str, Any], side: str, alias: str) -> list[int] | None:
    shape = definition.get(side, {}).get(alias, {}).get("tensor_shape")
    return None if shape is None or shape["unknown_rank"] else [int(dim["size"]) for dim in shape["dim"]]


def _version(status: VersionStatus, progress: list[VersionProgress]) -> dict[str, Any]:
    same = [one for one in progress if one.version == status.version]
    found = next((one for one in same if one.state is status.state), same[-1] if same else None)
    error = "" if status.error is None else status.error.message
    return {
        "version": str(status.version),
        "state": status.state.name,
        "error": (found.fault if found is not None and error else "") or error,
        "load_seconds": None if found is None else found.load_seconds,
        **({} if found is None else _files(found.path)),
    }


def _files(path: FilePath) -> dict[str, Any]:
    """Return what the files of a version say. They are read again if its graph or its manifest changes.

    A version that is not pulled from its store yet has no files.
    """
    if not isinstance(path, Path):
        return {"path": str(path), "bytes": None, "layout": "SavedModel", "source": None, "tables": []}
    return _read_files(path, _changed(path / GRAPH_FILE), _changed(path / MANIFEST_PATH))


def _changed(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=1024)
def _read_files(path: Path, *_: int) -> dict[str, Any]:
    found: dict[str, Any] = {"path": str(path), "bytes": None, "layout": "SavedModel", "source": None, "tables": []}
    try:
        found["bytes"] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        manifest = Manifest.read(path)
    except (ConfigError, OSError):
        return found
    if manifest is not None:
        storage = {stack.name: stack.storage for stack in manifest.stacks}
        found["layout"], found["source"] = manifest.layout, dict(manifest.source)
        found["written_by"] = manifest.tool_version
        found["tables"] = [
            {"name": table.name, "rows": table.rows, "dim": table.dim, "storage": storage[table.stack]}
            for table in manifest.tables
        ]
    return found
