"""Serve SavedModels over TensorFlow Serving's REST and gRPC APIs.

`settings` has the settings of a server, and `server` runs it in one process or several.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpuembed_serving.http.app import ServingApp, create_app
    from tpuembed_serving.models.config import read_models
    from tpuembed_serving.models.in_use import versions_in_use
    from tpuembed_serving.models.policies import AllVersions, LatestVersions, SpecificVersions
    from tpuembed_serving.server import serve
    from tpuembed_serving.settings import LogSettings, ModelSettings, ServerSettings, TelemetrySettings

_HOME = {
    "AllVersions": "tpuembed_serving.models.policies",
    "LatestVersions": "tpuembed_serving.models.policies",
    "LogSettings": "tpuembed_serving.settings",
    "ModelSettings": "tpuembed_serving.settings",
    "ServerSettings": "tpuembed_serving.settings",
    "TelemetrySettings": "tpuembed_serving.settings",
    "SpecificVersions": "tpuembed_serving.models.policies",
    "read_models": "tpuembed_serving.models.config",
    "ServingApp": "tpuembed_serving.http.app",
    "create_app": "tpuembed_serving.http.app",
    "serve": "tpuembed_serving.server",
    "versions_in_use": "tpuembed_serving.models.in_use",
}

__all__ = [
    "AllVersions",
    "LatestVersions",
    "LogSettings",
    "ModelSettings",
    "ServerSettings",
    "ServingApp",
    "SpecificVersions",
    "TelemetrySettings",
    "create_app",
    "read_models",
    "serve",
    "versions_in_use",
]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it (PEP 562). Importing settings loads no web framework."""
    if name not in _HOME:
        raise AttributeError(f"module 'tpuembed_serving' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted(__all__)
