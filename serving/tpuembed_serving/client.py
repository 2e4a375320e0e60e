"""A client for this server's binary API: numpy arrays in, numpy arrays out. Standard library and numpy alone.

with BinaryClient("http://127.0.0.1:8501") as client:
    answer = client.predict("movies", {"user": np.array([1, 2]), "watched": np.array([[3, 4], [5, -1]])})
    answer.outputs["score"], answer.version
"""

import contextlib
import dataclasses
import http.client
import json
import ssl
import urllib.parse
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ServingError
from tpuembed_serving.http.binary_frames import CONTENT_TYPE, Frame, decode_frame, encode_frame

__all__ = ["BinaryClient", "Prediction", "RequestFailedError"]

_STALE: Final = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)
"""What becomes of a request on a connection that the server has closed while nobody looked."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """An answer.

    Attributes:
        outputs: read-only arrays by name.
        version: of the model that answered.
    """

    outputs: Mapping[str, npt.NDArray[Any]]
    version: int


class RequestFailedError(ServingError):
    """The server refused a request, or could not answer it.

    Attributes:
        status: of HTTP.
        message: the server's.
        retry_after_seconds: where the server was too busy.
    """

    def __init__(self, status: int, message: str, retry_after_seconds: float | None) -> None:
        super().__init__(f"the server answered {status}: {message}")
        self.status, self.message, self.retry_after_seconds = status, message, retry_after_seconds


class BinaryClient:
    """One connection, which is kept open; for one thread."""

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float = 30.0,
        headers: Mapping[str, str] | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """A client of the server at `url`; it connects when it is asked something.

        Args:
            url: such as `http://127.0.0.1:8501` or `https://models.example`; a path before /binary/ may follow.
            timeout_seconds: how long to wait for the server.
            headers: sent with every request, such as an API key's or `X-Request-Id`.
            ssl_context: for https, instead of the default one.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServingError(f"{url!r} is no URL of a server; give one such as http://127.0.0.1:8501")
        self._base = parts.path.rstrip("/")
        self._headers = {"Content-Type": CONTENT_TYPE, **(headers or {})}
        self._connection: http.client.HTTPConnection
        if parts.scheme == "https":
            self._connection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=timeout_seconds, context=ssl_context
            )
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_seconds)

    def predict(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        version: int | None = None,
        label: str | None = None,
        signature_name: str = "serving_default",
    ) -> Prediction:
        """Run a signature of a model.

        Args:
            model: its name.
            inputs: by name; every dtype is what the signature has (`GET /v1/models/NAME/metadata`).
            version: the newest one by default.
            label: instead of a version.
            signature_name: which of the model's signatures.

        Raises:
            RequestFailedError: the server refused it.
            FrameError: an input has a dtype without a binary form, or the answer is no frame.
            OSError: the server cannot be reached, or takes too long.
        """
        tensors = {name: np.asarray(value) for name, value in inputs.items()}
        frame = self._post(_path(model, version, label), encode_frame(tensors, {"signature_name": signature_name}))
        return Prediction(frame.tensors, int(frame.members["version"]))

    def _post(self, path: str, body: bytes) -> Frame:
        reply, data = self._exchange(self._base + path, body)
        if reply.status == http.HTTPStatus.OK:
            return decode_frame(data)
        after = reply.getheader("Retry-After", "")
        raise RequestFailedError(reply.status, _message(data), float(after) if after.isdigit() else None)

    def _exchange(self, path: str, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        """A connection that was left open may be closed by now: a prediction changes nothing, and is asked for once more."""
        if self._connection.sock is not None:
            with contextlib.suppress(*_STALE):
                return self._exchange_once(path, body)
        return self._exchange_once(path, body)

    def _exchange_once(self, path: str, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        try:
            self._connection.request("POST", path, body, self._headers)
            reply = self._connection.getresponse()
            return reply, reply.read()
        except BaseException:  # half an answer must not be taken for the next one
            self._connection.close()
            raise

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _path(model: str, version: int | None, label: str | None) -> str:
    if version is not None and label is not None:
        raise ServingError(f"model {model}: version {version} and label {label} are both given; leave one out")
    path = f"/binary/v1/models/{urllib.parse.quote(model, safe='')}"
    if version is not None:
        path += f"/versions/{version}"
    if label is not None:
        path += f"/labels/{urllib.parse.quote(label, safe='')}"
    return f"{path}:predict"


def _message(data: bytes) -> str:
    """Of an error's JSON; what it is not is shown as it is."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(data)["error"])
    return data[:200].decode("utf-8", "replace")
