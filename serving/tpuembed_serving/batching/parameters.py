"""TensorFlow Serving's batching parameters: reads and checks a BatchingParameters message in text format.

Source: tensorflow_serving/servables/tensorflow/session_bundle_config.proto. The rules are in its comments and in
TensorFlow's shared_batch_scheduler.h.
"""

import dataclasses
from pathlib import Path
from typing import Any, Final

from tpuembed.errors import ConfigError, reason
from tpuembed.formats.protobuf import MalformedError
from tpuembed.formats.protobuf_text import message_class, parse_text

__all__ = ["BatchingParameters", "read_parameters"]

_ROWS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchingParameters:
    """Parameters of batching. Sizes are in rows.

    Attributes:
        max_batch_size: the largest batch. A request with more rows is refused.
        batch_timeout_micros: how long the first request of a batch may wait for others while a thread is free.
        max_enqueued_batches: how many batches of this size may wait, for each signature; None is the server's limit.
        num_batch_threads: how many batches run at once; None is the server's number.
        thread_pool_name: the name of those threads; None is the server's name.
        allowed_batch_sizes: the sizes of batches, which are filled up to the next one; empty for any size.
        pad_variable_length_inputs: whether inputs that differ in other dimensions than the first are made equal.
        enable_large_batch_splitting: whether a request of up to `max_batch_size` may be split into several runs.
        max_execution_batch_size: the largest run, if requests are split.
    """

    max_batch_size: int = _ROWS
    batch_timeout_micros: int = 0
    max_enqueued_batches: int | None = None
    num_batch_threads: int | None = None
    thread_pool_name: str | None = None
    allowed_batch_sizes: tuple[int, ...] = ()
    pad_variable_length_inputs: bool = False
    enable_large_batch_splitting: bool = False
    max_execution_batch_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_enqueued_batches", "num_batch_threads", "max_execution_batch_size"):
            _check_at_least(name, getattr(self, name), 1)
        _check_at_least("batch_timeout_micros", self.batch_timeout_micros, 0)
        self._check_splitting()
        self._check_allowed()

    @property
    def run_rows(self) -> int:
        """Return the most rows of a run."""
        return self.max_execution_batch_size or self.max_batch_size

    def _check_splitting(self) -> None:
        largest = self.max_execution_batch_size
        if largest is None:
            return
        if not self.enable_large_batch_splitting:
            raise ConfigError(
                f"max_execution_batch_size is {largest}, but enable_large_batch_splitting is not true. Set it to true, or "
                f"remove max_execution_batch_size"
            )
        if largest > self.max_batch_size:
            raise ConfigError(
                f"max_execution_batch_size is {largest}, and max_batch_size is {self.max_batch_size}. Give max_batch_size or less"
            )

    def _check_allowed(self) -> None:
        sizes = self.allowed_batch_sizes
        if not sizes:
            return
        if list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            given = ", ".join(map(str, sizes))
            raise ConfigError(f"allowed_batch_sizes are {given}. Give increasing sizes above 0")
        if sizes[-1] != self.run_rows:
            name = "max_batch_size" if self.max_execution_batch_size is None else "max_execution_batch_size"
            raise ConfigError(f"the last of allowed_batch_sizes is {sizes[-1]}. It must equal {name}, {self.run_rows}")


def read_parameters(path: Path) -> BatchingParameters:
    """Read the parameters from the file at `path`, a BatchingParameters message in protobuf's text format.

    Raises:
        ConfigError: the file cannot be read, or a field is unknown or wrong. The message names the file and the field.
    """
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"batching parameters {path}: cannot be read: {reason(error)}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"batching parameters {path}: is not UTF-8 text. Save it as UTF-8") from None
    except ConfigError as error:
        raise ConfigError(f"batching parameters {path}: {error}") from None


def _parse(text: str) -> BatchingParameters:
    try:
        message = parse_text(text, message_class("BatchingParameters", {"BatchingParameters": _FIELDS})())
    except MalformedError as error:
        raise ConfigError(str(error)) from None
    fields: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name == "allowed_batch_sizes":
            fields[field.name] = tuple(value)
        else:
            fields[field.name] = value if isinstance(value, bool) else value.value
    return BatchingParameters(**fields)


_FIELDS: Final = {
    "max_batch_size": "Int64Value",
    "batch_timeout_micros": "Int64Value",
    "max_enqueued_batches": "Int64Value",
    "num_batch_threads": "Int64Value",
    "thread_pool_name": "StringValue",
    "allowed_batch_sizes": "repeated int64",
    "pad_variable_length_inputs": "bool",
    "enable_large_batch_splitting": "BoolValue",
    "max_execution_batch_size": "Int64Value",
}
"""The message, which tensorflow-serving-api does not include."""


def _check_at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name} is {value}. Give {least} or more")
