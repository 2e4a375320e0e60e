"""Slices that do and do not cover a tensor exactly once, against counting every element."""

import itertools
import random

import numpy as np
import pytest

from tests.support.messages import refused
from tpuembed.formats.protobuf import MalformedError
from tpuembed.formats.tensor_bundle import Slice
from tpuembed.formats.tensor_bundle.index import check_tiling


def boxes(*corners: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Slice]:
    return [Slice(start=start, shape=shape, shard=0, offset=0, size=0, crc32c=0) for start, shape in corners]


@pytest.mark.parametrize(
    "corners",
    [
        [((0, 0), (3, 4)), ((2, 0), (2, 4))],
        [((0, 0), (2, 4)), ((1, 0), (2, 4))],
        [((0, 0), (2, 4)), ((0, 0), (2, 4))],
    ],
)
def test_messages(corners: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    with refused(MalformedError):
        check_tiling((4, 4), boxes(*corners))


def test_too_few_elements() -> None:
    holes = check_tiling((4, 4), boxes(((0, 0), (2, 4)), ((2, 0), (2, 3))))
    assert holes == "its 2 slices leave holes: 14 elements of 16"


def test_many_slices_take_linear_time() -> None:
    assert not check_tiling((200_000, 4), boxes(*(((row, 0), (1, 4)) for row in range(200_000))))


def test_empty_boxes_and_tensors() -> None:
    assert not check_tiling((0, 4), boxes(((0, 0), (0, 4))))
    assert not check_tiling((3, 4), boxes(((0, 0), (3, 4)), ((3, 0), (0, 4))))


def test_a_tiling_is_what_counting_every_element_says() -> None:
    """All sets of up to four random boxes in [3, 2, 2], judged as a count of each element judges them."""
    rng = random.Random(0)
    shape = (3, 2, 2)
    lines = [[(a, b - a) for a in range(size) for b in range(a + 1, size + 1)] for size in shape]
    every = [(tuple(a for a, _ in box), tuple(n for _, n in box)) for box in itertools.product(*lines)]
    verdicts = set()
    for _ in range(20_000):
        chosen = rng.sample(every, rng.randint(1, 4))
        count = np.zeros(shape, int)
        for start, size in chosen:
            count[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] += 1
        try:
            verdict = not check_tiling(shape, boxes(*chosen))
        except MalformedError:
            verdict = False
        assert verdict == bool((count == 1).all())
        verdicts.add(verdict)
    assert verdicts == {True, False}
