"""Canonical status codes and the error that carries one, free of any transport."""

import enum

from tpuembed.errors import ServingError

__all__ = ["Code", "StatusError", "invalid_argument", "servable_not_found", "still_loading"]


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
    """A request, or the load of a version, that ends in a status other than OK."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type["StatusError"], tuple[Code, str]]:
        """Pickled with its code: processes of one server tell each other."""
        return type(self), (self.code, self.message)

    def to_string(self) -> str:
        """Code and message, as `absl::Status::ToString` writes them."""
        return f"{self.code.name}: {self.message}"


def invalid_argument(message: str) -> StatusError:
    """The status of nearly every bad request."""
    return StatusError(Code.INVALID_ARGUMENT, message)


def servable_not_found(model: str, version: int | None) -> StatusError:
    """The status of a request for a version that is not available; None is the newest."""
    request = f"Latest({model})" if version is None else f"Specific({model}, {version})"
    return StatusError(Code.NOT_FOUND, f"Servable not found for request: {request}")


def still_loading() -> StatusError:
    """Returns the status of requests that come before each configured model's first load has ended."""
    text = "the server is loading; it answers once the first load of each configured model has ended, as /readyz says"
    return StatusError(Code.UNAVAILABLE, text)
