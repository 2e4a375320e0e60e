"""What the server and its models are: the metadata and the readiness of the Open Inference Protocol."""

from collections.abc import Mapping
from typing import Any, Final

import tpuembed
from tpuembed_serving.core.servable import State
from tpuembed_serving.core.service import ModelService, ModelSpec
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.open_inference.inference import find_signature, signature_names
from tpuembed_serving.open_inference.tensors import datatype_of

__all__ = ["is_ready", "model_metadata", "server_metadata"]

_PLATFORM: Final = "tensorflow_savedmodel"
_UNKNOWN_RANK: Final = [-1]


def server_metadata() -> dict[str, Any]:
    """Return the answer of the server metadata API: the name, the version and the extensions of this server."""
    return {"name": "tpuembed", "version": tpuembed.__version__, "extensions": ["binary_tensor_data"]}


async def is_ready(service: ModelService, spec: ModelSpec) -> bool:
    """Returns True if the version that `spec` names is available, and False if it may become so.

    Raises:
        StatusError: NOT_FOUND, there is no such model or version; INVALID_ARGUMENT, there is no such label.
    """
    try:
        await service.ask(spec)
        with service.lease(spec):
            return True
    except StatusError as error:
        if error.code is Code.UNAVAILABLE:
            return False
        is_known = spec.name in service.models() and (
            spec.version is None or any(one.version == spec.version for one in service.versions(spec.name))
        )
        if error.code is Code.NOT_FOUND and is_known:
            return False
        raise


async def model_metadata(service: ModelService, spec: ModelSpec) -> dict[str, Any]:
    """Return the answer of the model metadata API: the default signature of the version that `spec` names, and the numbers of all
    available versions. In shapes -1 is any size. The names of all signatures are in `properties`.

    Raises:
        StatusError: the version is not available, has no default signature, or one with a dtype that the protocol lacks.
    """
    await service.ask(spec)
    with service.lease(spec) as loaded:
        signature = find_signature(loaded.servable, "")
        definition = loaded.servable.signature_defs[signature.name]
        tensors = {
            side: [
                {"name": one.alias, "datatype": datatype_of(one), "shape": _shape(definition[side][one.alias])}
                for one in getattr(signature, side)
            ]
            for side in ("inputs", "outputs")
        }
        return {
            "name": spec.name,
            "versions": [str(one.version) for one in service.versions(spec.name) if one.state is State.AVAILABLE],
            "platform": _PLATFORM,
            **tensors,
            "properties": {"signature_names": ", ".join(signature_names(loaded.servable))},
        }


def _shape(info: Mapping[str, Any]) -> list[int]:
    """Return a shape from the JSON form of a TensorInfo. The protocol has no form for an unknown rank."""
    shape = info["tensor_shape"]
    return _UNKNOWN_RANK if shape["unknown_rank"] else [int(dim["size"]) for dim in shape["dim"]]
