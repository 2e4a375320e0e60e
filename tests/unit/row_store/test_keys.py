"""Keys: their text, and how they spread over the slots of a cluster."""

from collections import Counter

import numpy as np
import pytest
from redis.crc import key_slot

from tests.support.messages import refused
from tpuembed.errors import ConfigError
from tpuembed.row_store import ArrayKeys, check_model
from tpuembed.row_store.commands import Calls
from tpuembed.row_store.keys import BUCKETS, TAGS, buckets_of


def test_the_text_of_keys() -> None:
    keys = ArrayKeys("rec", "9c0e6b1d2f3a").of(np.array([0, 1234, 2**40 - 1]))
    tags = [TAGS[bucket].decode() for bucket in buckets_of(np.array([0, 1234, 2**40 - 1]))]
    assert [key.tobytes().decode() for key in keys] == [
        f"{tags[0]}rec:9c0e6b1d2f3a:0000000000",
        f"{tags[1]}rec:9c0e6b1d2f3a:00000004d2",
        f"{tags[2]}rec:9c0e6b1d2f3a:ffffffffff",
    ]


def test_tags_divide_the_slots_evenly() -> None:
    slots = [key_slot(tag + b"rec:x:0") for tag in TAGS]  # redis-py's own slots
    assert [slot // 64 for slot in slots] == list(range(BUCKETS))
    assert {len(tag) for tag in TAGS} == {5}


@pytest.mark.parametrize("step", [1, 2, 7, 128, 256, 1 << 20])
def test_rows_spread_over_the_buckets(step: int) -> None:
    counts = Counter(buckets_of(np.arange(0, step * 100_000, step)).tolist())
    assert len(counts) == BUCKETS
    assert max(counts.values()) < 1.25 * 100_000 / BUCKETS


def test_commands_are_resp() -> None:
    keys = np.frombuffer(b"{00f}a{01e}b{00f}c", np.uint8).reshape(3, 6)
    values = np.frombuffer(b"xyXYzz", np.uint8).reshape(3, 2)
    reads = Calls(b"MGET", keys, np.array([7, 3, 7], np.uint8))
    assert [reads.encoded(span) for span in reads.spans] == [
        b"*2\r\n$4\r\nMGET\r\n$6\r\n{01e}b\r\n",
        b"*3\r\n$4\r\nMGET\r\n$6\r\n{00f}a\r\n$6\r\n{00f}c\r\n",
    ]
    assert reads.order is not None
    assert reads.order.tolist() == [1, 0, 2]
    writes = Calls(b"MSET", keys, None, values)
    assert [writes.encoded(span) for span in writes.spans] == [
        b"*7\r\n$4\r\nMSET\r\n$6\r\n{00f}a\r\n$2\r\nxy\r\n$6\r\n{01e}b\r\n$2\r\nXY\r\n$6\r\n{00f}c\r\n$2\r\nzz\r\n"
    ]
    assert list(writes.one_by_one(writes.spans[0]))[1] == ("SET", b"{01e}b", b"XY")


def test_a_command_has_few_keys() -> None:
    calls = Calls(b"MGET", np.zeros((10_000, 4), np.uint8), None)
    assert [(span.start, span.stop) for span in calls.spans] == [(0, 4096), (4096, 8192), (8192, 10_000)]


@pytest.mark.parametrize("name", ["", "a:b", "a{b", "é", "x" * 101])
def test_names_that_are_no_part_of_a_key(name: str) -> None:
    with refused(ConfigError):
        check_model(name)


def test_no_rows_have_no_keys() -> None:
    assert ArrayKeys("rec", "9c0e6b1d2f3a").of(np.array([], np.int64)).shape == (0, 5 + 4 + 13 + 10)
