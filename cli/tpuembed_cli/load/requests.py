"""The requests of a load: recorded ones, or the example that a server gives of itself."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tpuembed.errors import ConfigError, reason

__all__ = ["Requests", "read_requests"]

_MOST: Final = 1000


@dataclasses.dataclass(frozen=True)
class Requests:
    """The bodies of requests, which are sent in turns.

    Attributes:
        bodies: JSON of the REST API, or messages of gRPC.
        rows: the number of rows of each.
        origin: where they are from, for people.
    """

    bodies: tuple[bytes, ...]
    rows: tuple[int, ...]
    origin: str

    @property
    def mean_rows(self) -> float:
        """The mean number of rows of a request."""
        return sum(self.rows) / len(self.rows)

    def first(self) -> "Requests":
        """Return the first request alone."""
        return Requests(self.bodies[:1], self.rows[:1], f"the first of {self.origin}")

    @classmethod
    def of_json(cls, body: bytes, origin: str) -> "Requests":
        """Return one request of the REST API.

        Raises:
            ConfigError: it is no predict request in JSON.
        """
        try:
            found = json.loads(body)
            rows = found["instances"] if "instances" in found else found["inputs"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f'{origin}: is neither a recorded request nor JSON with "instances" or "inputs". Give one of these.'
            ) from None
        if "instances" not in found and isinstance(rows, dict):
            rows = next(iter(rows.values()), None)
        return cls((body,), (len(rows) if isinstance(rows, list) else 1,), origin)


def read_requests(path: Path, model: str, *, grpc: bool) -> Requests:
    """Return the predict requests in a file: records of PredictionLog, as warm-up files have, or the JSON of one request.

    Raises:
        ConfigError: the file cannot be read, or has no predict request that the API can carry.
    """
    try:
        start = path.read_bytes()[:16].lstrip()[:1]
        if start == b"{":
            if grpc:
                raise ConfigError(
                    f"requests {path}: are JSON, which gRPC does not take. Give a file of PredictionLog records."
                )
            return Requests.of_json(path.read_bytes(), f"requests {path}")
        logs = list(itertools.islice(_predict_requests(path), _MOST))
    except OSError as error:
        raise ConfigError(f"requests {path}: cannot be read: {reason(error)}.") from None
    bodies, rows = [], []
    for request in logs:
        request.model_spec.name = model
        request.model_spec.ClearField("version")
        request.model_spec.ClearField("version_label")
        bodies.append(request.SerializeToString() if grpc else _as_json(request))
        sizes = [tensor.tensor_shape.dim[0].size for tensor in request.inputs.values() if tensor.tensor_shape.dim]
        rows.append(max(sizes, default=1))
    found = [(body, count) for body, count in zip(bodies, rows, strict=True) if body]
    if not found:
        carried = "" if grpc else " that JSON can carry"
        raise ConfigError(f"requests {path}: has no predict request{carried}. Record some, or give another file.")
    return Requests(
        tuple(body for body, _ in found), tuple(count for _, count in found), f"{len(found)} recorded requests"
    )


def _predict_requests(path: Path) -> Iterator[Any]:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorflow_serving.apis import prediction_log_pb2

    from tpuembed_serving.core.status import StatusError
    from tpuembed_serving.models.warmup import read_records

    try:
        for record in read_records(path):
            log = prediction_log_pb2.PredictionLog.FromString(record)
            if log.WhichOneof("log_type") == "predict_log":
                yield log.predict_log.request
    except (StatusError, DecodeError) as error:
        why = str(error).rstrip(".")
        raise ConfigError(f"requests {path}: is no file of PredictionLog records: {why}.") from None


def _as_json(request: Any) -> bytes:
    """Return the body of a request by columns. Empty if JSON has no form for it."""
    import tensorflow as tf

    from tpuembed_serving.http.example_requests import columnar_body

    inputs = {name: tf.make_ndarray(tensor) for name, tensor in request.inputs.items()}
    body = columnar_body(inputs, request.model_spec.signature_name)
    return b"" if body is None else body.encode()
