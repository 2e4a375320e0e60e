"""Serve SavedModels over TensorFlow Serving's REST and gRPC APIs.

settings      what a server is told; models_config reads it from a models.config, policies say which versions are served
versions      which folders are versions, and whether one is whole
served_model  versions of one model loaded, swapped, unloaded, while requests hold the one they run on
repository    all models, and the replacement of their config
runtime       a SavedModel in a TensorFlow session (the only module that imports TensorFlow)
executor      runs on a few threads, with a bounded queue and a deadline
service       predict, status, metadata, free of any transport
json_codec    TensorFlow Serving's JSON to arrays and back
rest, rpc     the /v1/ API as raw ASGI, and gRPC; app puts FastAPI around it; http_server runs it
binary_api    arrays as bytes (binary_frames), at URLs of our own; client speaks it
telemetry     what operators see: observation keeps a record of a request, metrics, access_log and tracing make something of it
pages         the list of models and the documentation
server        one process, or a supervisor of several workers; fleet has what these tell each other
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpuembed_serving.http.app import ServingApp, create_app
    from tpuembed_serving.models.config import read_models
    from tpuembed_serving.models.policies import AllVersions, LatestVersions, SpecificVersions
    from tpuembed_serving.server import serve
    from tpuembed_serving.settings import LoadSettings, ModelSettings, ServerSettings, TelemetrySettings

_HOME = {
    "AllVersions": "tpuembed_serving.models.policies",
    "LatestVersions": "tpuembed_serving.models.policies",
    "LoadSettings": "tpuembed_serving.settings",
    "ModelSettings": "tpuembed_serving.settings",
    "ServerSettings": "tpuembed_serving.settings",
    "TelemetrySettings": "tpuembed_serving.settings",
    "SpecificVersions": "tpuembed_serving.models.policies",
    "read_models": "tpuembed_serving.models.config",
    "ServingApp": "tpuembed_serving.http.app",
    "create_app": "tpuembed_serving.http.app",
    "serve": "tpuembed_serving.server",
}

__all__ = [
    "AllVersions",
    "LatestVersions",
    "LoadSettings",
    "ModelSettings",
    "ServerSettings",
    "ServingApp",
    "SpecificVersions",
    "TelemetrySettings",
    "create_app",
    "read_models",
    "serve",
]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it (PEP 562): settings need no web framework."""
    if name not in _HOME:
        raise AttributeError(f"module 'tpuembed_serving' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted(__all__)
