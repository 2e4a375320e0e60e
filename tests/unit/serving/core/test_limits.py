"""Limits of what is in a request: rows, and the depth of JSON."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.serving.doubles import DoublingServable, signature
from tpuembed.errors import ConfigError
from tpuembed_serving.core.row_limit import RowLimit
from tpuembed_serving.core.security import ConnectionLimits, SecuritySettings
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.http.json import parse_document

SIGNATURE = signature({"a": "int64", "b": "int64"})


class Echo:
    async def run(self, servable: Any, signature: Any, inputs: Sequence[Any], **options: Any) -> list[Any]:
        return list(inputs)


def run(*inputs: Any) -> list[Any]:
    arrays = [np.array(values, np.int64) for values in inputs]
    return asyncio.run(RowLimit(Echo(), 3).run(DoublingServable(), SIGNATURE, arrays))


def test_requests_of_as_many_rows_as_may_be() -> None:
    assert len(run([1, 2, 3], 7)) == 2
    assert len(run(7, [[1], [2], [3]])) == 2
    assert run() == []


def test_requests_of_more_rows_are_refused_by_any_input() -> None:
    for inputs in (([1, 2, 3, 4], 7), (7, [[1], [2], [3], [4]])):
        with pytest.raises(StatusError, match=r"4 rows\. The limit is 3") as refused:
            run(*inputs)
        assert refused.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("inner", [b"[", b'{"a":'])
def test_json_is_as_deep_as_it_may_be(inner: bytes) -> None:
    close = b"]" if inner == b"[" else b"}"

    def body(depth: int) -> bytes:
        return b'{"unknown": ' + inner * (depth - 1) + b"1" + close * (depth - 1) + b', "instances": [1]}'

    for depth in (5, 300):
        assert parse_document(body(depth), 300).members["instances"] == [1]
    with pytest.raises(StatusError, match=r"nested too deeply \(limit: 300 levels\)"):
        parse_document(body(301), 300)
    assert parse_document(body(301)).members["instances"] == [1]
    for deep in (inner * 5_000_000, body(100_000), body(100_000).replace(b"1", b"NaN")):
        with pytest.raises(StatusError, match="nested too deeply"):
            parse_document(deep)


@pytest.mark.parametrize("options", [{"max_rows": 0}, {"max_json_depth": 0}])
def test_limits_that_let_nothing_through_are_refused(options: dict[str, int]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        SecuritySettings(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"connections": 0}, {"header_bytes": 0}, {"receive_seconds": 0.0}])
def test_so_are_those_of_connections(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ConnectionLimits(**options)
