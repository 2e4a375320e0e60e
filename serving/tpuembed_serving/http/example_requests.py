"""Makes a predict request that a loaded model answers, from its first warm-up record or its signature. Runs no model."""

import base64
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from tpuembed.errors import ConfigError
from tpuembed.manifest import Manifest
from tpuembed_serving.core.servable import Array, Servable
from tpuembed_serving.core.service import DEFAULT_SIGNATURE
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.models.warmup import WARMUP_PATH, read_records

__all__ = ["EXAMPLES", "columnar_body", "example_body", "signature_example"]

EXAMPLES: Final = "examples"
"""The topic of a question for the example of each model."""

_ZEROS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8", "uint32", "uint64"), 0),
    **dict.fromkeys(("float", "double"), 0.0),
    "bool": False,
    "string": "",
}
"""The values of the dtypes that requests and answers in JSON have."""
_MOST_CHARACTERS: Final = 1000
"""A longer body is no example to paste."""
_MOST_OF_FORM: Final = 20_000
"""A longer body is none to edit."""
_SEARCHED_RECORDS: Final = 1000


def example_body(servable: Servable, version_dir: Path | None) -> str | None:
    """Return the JSON of a request, or None if there is none in JSON. `version_dir` is None for another server's model."""
    body = _recorded(servable, version_dir) if version_dir is not None else None
    body = body or _of_signature(servable, version_dir)
    return body if body is not None and len(body) <= _MOST_CHARACTERS else None


def signature_example(servable: Servable, version_dir: Path | None, signature: str) -> str | None:
    """Return the JSON of a predict request to `signature`: its first recorded one, or one of zeros; None if neither exists."""
    body = _recorded(servable, version_dir, signature) if version_dir is not None else None
    body = body or _of_signature(servable, version_dir, signature)
    return body if body is not None and len(body) <= _MOST_OF_FORM else None


def columnar_body(inputs: Mapping[str, Array], signature: str) -> str | None:
    """Return the JSON of a predict request with all rows of `inputs`. None if a value has no JSON form."""
    return _json(inputs, signature or DEFAULT_SIGNATURE, by_rows=False)


def _recorded(servable: Servable, version_dir: Path, signature: str | None = None) -> str | None:
    """Return the first row of the first recorded request, as JSON, or of the first one to `signature`."""
    path = version_dir / WARMUP_PATH
    if not path.is_file():
        return None
    import tensorflow as tf
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorflow_serving.apis import prediction_log_pb2

    try:
        for record in itertools.islice(read_records(path), _SEARCHED_RECORDS):
            request = prediction_log_pb2.PredictionLog.FromString(record).predict_log.request
            name = request.model_spec.signature_name or DEFAULT_SIGNATURE
            if signature is None or (name == signature and request.inputs):
                break
        else:
            return None
        inputs = {name: tf.make_ndarray(tensor) for name, tensor in request.inputs.items()}
    except (StatusError, OSError, DecodeError, TypeError, ValueError):
        return None
    shapes = _shapes(servable, name)
    if not inputs or shapes is None or shapes.keys() != inputs.keys():
        return None
    by_rows = all(array.ndim and len(array) for array in inputs.values())
    return _json(inputs, name, by_rows=by_rows and all(shape is None or shape[:1] == [-1] for shape in shapes.values()))


def _of_signature(servable: Servable, version_dir: Path | None, name: str = DEFAULT_SIGNATURE) -> str | None:
    """Return zeros for one row of each input."""
    signature, shapes = servable.signatures.get(name), _shapes(servable, name)
    if signature is None or shapes is None or not signature.inputs:
        return None
    try:
        manifest = None if version_dir is None else Manifest.read(version_dir)
    except ConfigError:
        return None
    if any(info.dtype not in _ZEROS for info in (*signature.inputs, *signature.outputs)):
        return None
    if manifest is None and any(info.dtype == "string" for info in signature.inputs):
        return None  # the graph may parse it
    values = {}
    for info in signature.inputs:
        shape = shapes[info.alias]
        sizes = [1 if size < 0 else size for size in ([-1] if shape is None else shape)]
        if math.prod(sizes) > _MOST_CHARACTERS:
            return None
        dtype = object if info.dtype == "string" else info.numpy_dtype
        values[info.alias] = np.full(sizes, _ZEROS[info.dtype], dtype)
    by_rows = all(shape is None or shape[:1] in ([-1], [1]) for shape in shapes.values())
    return _json(values, name, by_rows=by_rows)


def _shapes(servable: Servable, name: str) -> dict[str, list[int] | None] | None:
    """Return the shape of each input; -1 is any size, and None any rank. None if the signature is unknown."""
    inputs = servable.signature_defs.get(name, {}).get("inputs")
    if inputs is None:
        return None
    shapes = {alias: info["tensor_shape"] for alias, info in inputs.items()}
    return {
        alias: None if shape["unknown_rank"] else [int(dim["size"]) for dim in shape["dim"]]
        for alias, shape in shapes.items()
    }


def _json(inputs: Mapping[str, Array], signature: str, *, by_rows: bool) -> str | None:
    """Return a body of one row, or of all inputs as they are. None if a value has no JSON form."""
    if any(array.dtype.kind == "f" and not np.isfinite(array).all() for array in inputs.values()):
        return None
    try:
        values = {name: _value(array[0] if by_rows else array) for name, array in sorted(inputs.items())}
    except TypeError:  # a dtype that JSON does not have
        return None
    named = {} if signature == DEFAULT_SIGNATURE else {"signature_name": signature}
    return json.dumps({**named, **({"instances": [values]} if by_rows else {"inputs": values})})


def _value(array: Any) -> Any:
    """Return an array as lists: numbers with the fewest digits, and bytes that are not text in base 64."""
    if isinstance(array, str | bytes):
        return _strings(array)
    if array.dtype == object:
        return _strings(array.tolist())
    (value,) = json.loads(orjson.dumps(np.ascontiguousarray(array[np.newaxis]), option=orjson.OPT_SERIALIZE_NUMPY))
    return value


def _strings(value: Any) -> Any:
    if isinstance(value, list):
        return [_strings(one) for one in value]
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}
