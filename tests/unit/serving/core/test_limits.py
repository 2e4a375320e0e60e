"""The depth of JSON, and limits that are refused."""

from typing import Any

import pytest

from tests.support.messages import refused
from tpuembed.errors import ConfigError
from tpuembed_serving.core.security import ConnectionLimits
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.http.json import parse_document


@pytest.mark.parametrize("inner", [b"[", b'{"a":'])
def test_json_is_as_deep_as_it_may_be(inner: bytes) -> None:
    close = b"]" if inner == b"[" else b"}"

    def body(depth: int) -> bytes:
        return b'{"unknown": ' + inner * (depth - 1) + b"1" + close * (depth - 1) + b', "instances": [1]}'

    for depth in (5, 301):
        assert parse_document(body(depth)).members["instances"] == [1]
    for deep in (inner * 5_000_000, body(100_000), body(100_000).replace(b"1", b"NaN")):
        with refused(StatusError):
            parse_document(deep)


@pytest.mark.parametrize("options", [{"connections": 0}, {"header_bytes": 0}, {"receive_seconds": 0.0}])
def test_limits_that_let_nothing_through_are_refused(options: dict[str, Any]) -> None:
    with refused(ConfigError, match=next(iter(options))):
        ConnectionLimits(**options)
