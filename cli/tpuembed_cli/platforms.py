"""What platforms that host a model tell `tpuembed serve` by environment variables and folders.

Vertex AI: https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements
SageMaker: https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import click

__all__ = ["Platform"]

_ALL_ADDRESSES = "0.0.0.0"
_SAGEMAKER_PORT = 8080


@dataclasses.dataclass(frozen=True, kw_only=True)
class Platform:
    """What the platform gives for options that were not given.

    Attributes:
        model_dir: the folder or URL of the versions.
        host, rest_port: the address to listen on.
        no_grpc: whether nothing can reach the gRPC port.
        health_route, predict_route: URL paths, of Vertex AI.
    """

    model_dir: str | None = None
    host: str | None = None
    rest_port: int | None = None
    no_grpc: bool = False
    health_route: str | None = None
    predict_route: str | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str], *, needs_model: bool) -> "Platform":
        """Return what `environment` says. An empty variable is not set.

        Args:
            environment: of the process.
            needs_model: whether no option says what to serve.

        Raises:
            UsageError: a port is no port.
        """
        vertex_port, sagemaker_port = (_port(environment, name) for name in ("AIP_HTTP_PORT", "SAGEMAKER_BIND_TO_PORT"))
        model_dir = environment.get("AIP_STORAGE_URI") or None if needs_model else None
        folder = Path(environment.get("SAGEMAKER_BASE_DIR") or "/opt/ml") / "model"
        has_sagemakers = needs_model and model_dir is None and folder.is_dir()
        port = vertex_port or sagemaker_port or (_SAGEMAKER_PORT if has_sagemakers else None)
        return cls(
            model_dir=os.fspath(folder) if has_sagemakers else model_dir,
            host=None if port is None else _ALL_ADDRESSES,
            rest_port=port,
            no_grpc=vertex_port is None and (has_sagemakers or sagemaker_port is not None),
            health_route=environment.get("AIP_HEALTH_ROUTE") or None,
            predict_route=environment.get("AIP_PREDICT_ROUTE") or None,
        )


def _port(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65536):
        raise click.UsageError(f"{name} is {text!r}. Give a port from 1 to 65535")
    return int(text)
