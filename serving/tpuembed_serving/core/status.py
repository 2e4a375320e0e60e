"""Canonical status codes, and the error that carries one. Independent of the transport."""

import enum
import re
from typing import Any, Final

from tpuembed.errors import ServingError

__all__ = [
    "Code",
    "LoadStopped",
    "MustAskError",
    "StatusError",
    "TooLargeError",
    "invalid_argument",
    "of_later_rows",
    "plain_message",
    "servable_not_found",
    "still_loading",
    "stopping",
    "timed_out",
]

# Messages quote a client's strings, which may hold the beginning of a pattern many times. So a search that fails at one
# beginning does not read to the end of the message, or is tried at one beginning only.
_FUNCTION: Final = re.compile(r"\{\{function_node [^{}]*\}\} ?")
_ASSERTION: Final = "assertion failed: [feature "
_OUTSIDE: Final = re.compile(r"\]\s+\[\[(?:\{\{node )?[^\s\[\]{}]*tpuembed_id_outside")
"""What ends the sentence of an export about an id outside its table. `OUTSIDE` in tpuembed.lookup names the operation."""
_ESCAPED: Final = re.compile(r"\\(['\"\\])")
_ROW: Final = re.compile(r" of row (\d{1,19}) is not in table | of row (\d{1,19}) is not in the vocabulary of table ")


class Code(enum.IntEnum):
    """The canonical codes of gRPC and Abseil (google/rpc/code.proto)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class StatusError(ServingError):
    """A request or the load of a version failed with a status other than OK."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the code too: the processes of a server send each other errors."""
        return type(self), (self.code, self.message)

    def to_string(self) -> str:
        """Return code and message in the form of `absl::Status::ToString`."""
        return f"{self.code.name}: {self.message}"


class TooLargeError(StatusError):
    """A request is too large for the server's limits. HTTP answers 413."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.RESOURCE_EXHAUSTED, message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message."""
        return type(self), (self.message,)


class MustAskError(StatusError):
    """Raised on the event loop when a remote server has to resolve the label. In a thread, the same call waits for that server."""

    def __init__(self, label: str) -> None:
        super().__init__(Code.UNAVAILABLE, f"label {label} is not known yet. Send the request again")


class LoadStopped(StatusError):  # noqa: N818 - no error of the version's
    """A load that the server's stop ended: nothing is wrong with the version."""


def invalid_argument(message: str) -> StatusError:
    """Return the error of a bad request."""
    return StatusError(Code.INVALID_ARGUMENT, message)


def servable_not_found(model: str, version: int | None) -> StatusError:
    """Return the error of a request for a version that is not available. None is the newest version."""
    request = f"Latest({model})" if version is None else f"Specific({model}, {version})"
    return StatusError(Code.NOT_FOUND, f"Servable not found for request: {request}")


def still_loading() -> StatusError:
    """Return the error of requests that arrive before the first load of each configured model has ended."""
    text = "the server is loading. It answers once the first load of each configured model has ended. Check /readyz"
    return StatusError(Code.UNAVAILABLE, text)


def stopping() -> StatusError:
    """Return the error of a request that the server cannot answer any more."""
    return StatusError(Code.UNAVAILABLE, "the server is stopping")


def timed_out() -> StatusError:
    """Return the error of a request after its deadline: TensorFlow's text for a Session::Run that takes too long."""
    return StatusError(Code.DEADLINE_EXCEEDED, "Timed out waiting for notification")


def plain_message(message: str) -> str:
    """Return TensorFlow's `message` without function names. For an id outside its table, return only that sentence."""
    _, _, after = message.partition(_ASSERTION)
    ends = [found.start() for found in _OUTSIDE.finditer(after)]
    return _ESCAPED.sub(r"\1", f"feature {after[: ends[-1]]}") if ends else _FUNCTION.sub("", message)


def of_later_rows(error: Exception, rows: int) -> Exception:
    """Return the `error` of a part of a request that starts at row `rows`, with the row number of the whole request."""
    if not rows or not isinstance(error, StatusError):
        return error
    message = error.message  # a client's name stands before the row, and may hold the same words
    for found in [*_ROW.finditer(message)][-1:]:
        start, stop = found.span(found.lastindex or 0)
        message = f"{message[:start]}{int(message[start:stop]) + rows}{message[stop:]}"
    return StatusError(error.code, message)
