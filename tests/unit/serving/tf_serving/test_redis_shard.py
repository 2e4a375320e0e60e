"""Queries of the versions in Redis."""

import socket
import time

import pytest

from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.tf_serving import redis_shard
from tpuembed_serving.tf_serving.redis_shard import RedisStates


def test_a_redis_that_hangs_ends_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that polls asks all shards, so it waits for none of them for long."""
    monkeypatch.setattr(redis_shard, "_POLL_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        states = RedisStates(f"redis://127.0.0.1:{hanging.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(StatusError) as raised:
            states.versions("shard-0")
        seconds = time.monotonic() - start
        states.close()
    assert raised.value.code is Code.UNAVAILABLE
    assert seconds < 10, "the client waits for 30 seconds by default"
