"""The memory of bodies that are being received."""

import asyncio
import gzip
from typing import Any

import pytest

from tpuembed_serving.core.pipeline import INLINE_BYTES, MemoryBudget
from tpuembed_serving.core.status import Code, StatusError, TooLargeError
from tpuembed_serving.http.endpoint import Body, BodyReader, ClientLeftError

PART = b" " * INLINE_BYTES


class Client:
    """Sends parts of a body when it is told to. None is a disconnect."""

    def __init__(self, reader: BodyReader, *headers: tuple[bytes, bytes]) -> None:
        self.queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.body = asyncio.ensure_future(reader({"headers": headers}, self.queue.get))

    async def send(self, part: bytes | None, more: bool = True) -> None:
        message = {"type": "http.request", "body": part, "more_body": more}
        self.queue.put_nowait({"type": "http.disconnect"} if part is None else message)
        for _ in range(3):
            await asyncio.sleep(0)


def test_a_body_counts_while_it_arrives() -> None:
    async def scenario() -> None:
        memory = MemoryBudget(4 * len(PART))
        reader = BodyReader(1 << 30, memory)
        one, other, small = Client(reader), Client(reader), Client(reader)
        used = []
        for client in (one, other, one, one):
            await client.send(PART)
            used.append(memory._used)
        await small.send(PART, more=False)
        assert used == [0, 0, 2 * len(PART), 3 * len(PART)]
        assert await small.body == Body(PART, 0)
        await other.send(PART)
        with pytest.raises(StatusError, match=r"in flight use about 0\.8 MiB") as refused:
            await other.body
        assert refused.value.code is Code.UNAVAILABLE
        await one.send(PART, more=False)
        assert await one.body == Body(PART * 4, 4 * len(PART))
        assert memory._used == 4 * len(PART)  # until the answer

    asyncio.run(scenario())


@pytest.mark.parametrize("last", [PART * 3, None], ids=["too large", "client left"])
def test_nothing_stays_reserved_for_a_body_that_does_not_arrive(last: bytes | None) -> None:
    async def scenario() -> None:
        memory = MemoryBudget(4 * len(PART))
        client = Client(BodyReader(1 << 30, memory))
        await client.send(PART * 2)
        assert memory._used == 2 * len(PART)
        await client.send(last)
        with pytest.raises((TooLargeError, ClientLeftError)):
            await client.body
        assert memory._used == 0

    asyncio.run(scenario())


def test_an_inflated_body_counts_until_the_answer() -> None:
    async def scenario() -> None:
        memory = MemoryBudget(1 << 30)
        client = Client(BodyReader(1 << 30, memory), (b"content-encoding", b"gzip"))
        await client.send(gzip.compress(PART * 8), more=False)
        content, reserved = await client.body
        assert (content, reserved) == (PART * 8, 12 * 8 * len(PART))
        assert memory._used == reserved

    asyncio.run(scenario())
