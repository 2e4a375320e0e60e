"""Random graphs: those that are proven answer several requests at once as each alone, and most that keep rows apart are proven."""

import random
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import tensorflow as tf

from tests.support.row_graphs import RowGraph

SPECS: Final = {
    "x": tf.TensorSpec([None, 4], tf.float32),
    "k": tf.TensorSpec([None], tf.int64),
    "ids": tf.TensorSpec([None, None], tf.int64),
    "flag": tf.TensorSpec([None], tf.bool),
}
TABLE: Final = np.random.default_rng(1).normal(size=(64, 4)).astype(np.float32)
KERNEL: Final = np.random.default_rng(2).normal(size=(4, 4)).astype(np.float32)
Tensor = Any
Step = Callable[[Tensor, dict[str, Tensor]], Tensor]
"""float32 [rows, 4] to the same, with the inputs by name."""


def rows_of(x: Tensor) -> Tensor:
    return tf.shape(x)[0]


def entries(x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    where = tf.where(inputs["ids"] >= 0)
    found = tf.gather(TABLE, tf.gather_nd(inputs["ids"], where))
    return x + tf.math.unsorted_segment_sum(found, where[:, 0], rows_of(x))


def training_norm(x: Tensor, _: dict[str, Tensor]) -> Tensor:
    return tf.nn.batch_normalization(x, *tf.nn.moments(x, [0]), None, None, 1e-3)


def looped(x: Tensor, _: dict[str, Tensor]) -> Tensor:
    return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, tf.tanh(y) + x), (tf.constant(0), x))[1]


def looped_by_rows(x: Tensor, _: dict[str, Tensor]) -> Tensor:
    return tf.while_loop(lambda i, _: i < rows_of(x), lambda i, y: (i + 1, y + 1), (tf.constant(0), x))[1]


def looped_by_ids(x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    most = tf.reduce_max(inputs["k"])
    return tf.while_loop(lambda i, _: i < most, lambda i, y: (i + 1, y + 1), (tf.constant(0, tf.int64), x))[1]


def asserted(x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    with tf.control_dependencies([tf.debugging.assert_less(inputs["k"], tf.constant(60, tf.int64))]):
        return tf.identity(x)


def asserted_of_all(x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_sum(inputs["x"]) < 2.0, ["sum"])]):
        return tf.identity(x)


APART: Final[dict[str, Step]] = {
    "relu": lambda x, _: tf.nn.relu(x),
    "dense": lambda x, _: tf.matmul(x, KERNEL),
    "softmax": lambda x, _: tf.nn.softmax(x),
    "softmax by hand": lambda x, _: (
        tf.exp(x - tf.reduce_max(x, 1, True)) / tf.reduce_sum(tf.exp(x - tf.reduce_max(x, 1, True)), 1, True)
    ),
    "cumsum": lambda x, _: tf.cumsum(x, 1),
    "sort": lambda x, _: tf.sort(x, 1),
    "top": lambda x, _: tf.math.top_k(x, 4)[0],
    "mean": lambda x, _: x - tf.reduce_mean(x, 1, keepdims=True),
    "norm": lambda x, _: tf.nn.batch_normalization(x, KERNEL[0], KERNEL[1] ** 2, None, None, 1e-3),
    "table": lambda x, i: x + tf.gather(TABLE, i["k"]),
    "one hot": lambda x, i: x + tf.one_hot(i["k"], 4),
    "flag": lambda x, i: tf.where(i["flag"][:, None], x, -x),
    "turned": lambda x, _: tf.transpose(tf.tanh(tf.transpose(x))),
    "reshaped": lambda x, _: tf.reshape(tf.reverse(tf.reshape(x, [-1, 2, 2]), [1]), [rows_of(x), 4]),
    "flattened": lambda x, _: tf.reshape(tf.matmul(tf.reshape(x, [-1, 2]), KERNEL[:2, :2]), tf.shape(x)),
    "concatenated": lambda x, _: tf.concat([x[:, 2:], x[:, :2]], 1),
    "split": lambda x, _: tf.concat(tf.split(x, 2, 1)[::-1], 1),
    "stacked": lambda x, _: tf.reduce_sum(tf.stack([x, x * 2], 1), 1),
    "unstacked": lambda x, _: tf.add_n(tf.unstack(tf.reshape(x, [-1, 2, 2]), axis=1))[:, :1] + x,
    "einsum": lambda x, _: tf.einsum("bi,ij->bj", x, KERNEL),
    "pairs": lambda x, _: x + tf.einsum("bi,bi->b", x, x)[:, None],
    "ones": lambda x, _: x * tf.ones([rows_of(x), 1]),
    "tiled": lambda x, _: x + tf.tile(tf.constant([[1.0, 2, 3, 4]]), [rows_of(x), 1]),
    "padded": lambda x, _: tf.pad(x, [[0, 0], [1, 0]])[:, :4],
    "gathered columns": lambda x, _: tf.gather(x, [3, 0, 1, 2], axis=1),
    "an element": lambda x, i: x + tf.gather(x, i["k"] % 4, batch_dims=1)[:, None],
    "ids": lambda x, i: x + tf.reduce_sum(tf.gather(TABLE, tf.maximum(i["ids"], 0)), 1),
    "masked ids": lambda x, i: (
        x + tf.reduce_sum(tf.where((i["ids"] >= 0)[..., None], tf.gather(TABLE, tf.maximum(i["ids"], 0)), 0.0), 1)
    ),
    "width": lambda x, i: x / tf.cast(tf.shape(i["ids"])[1] + 1, tf.float32),
    "entries": entries,
    "argmax": lambda x, _: x + tf.cast(tf.argmax(x, 1), tf.float32)[:, None],
    "strings": lambda x, i: x + tf.cast(tf.strings.to_hash_bucket_fast(tf.as_string(i["k"]), 7), tf.float32)[:, None],
    "loop": looped,
    "assertion": asserted,
    "branch by a constant": lambda x, _: tf.cond(tf.constant(True), lambda: x + 1, lambda: x - 1),
    "branch by the width": lambda x, i: tf.cond(tf.shape(i["ids"])[1] > 2, lambda: x + 1, lambda: x - 1),
}
MIXING: Final[dict[str, Step]] = {
    "softmax": lambda x, _: tf.nn.softmax(x, axis=0),
    "cumsum": lambda x, _: tf.cumsum(x, 0),
    "sort": lambda x, _: tf.sort(x, 0),
    "top": lambda x, _: tf.transpose(tf.math.top_k(tf.transpose(x), rows_of(x))[0]),
    "unique": lambda x, i: x + tf.cast(tf.unique(i["k"])[1], tf.float32)[:, None],
    "mean": lambda x, _: x - tf.reduce_mean(x, 0),
    "mean of all": lambda x, _: x - tf.reduce_mean(x),
    "highest": lambda x, _: x - tf.reduce_max(x),
    "training norm": training_norm,
    "random": lambda x, _: x + tf.random.uniform(tf.shape(x)),
    "batch size": lambda x, _: x / tf.cast(rows_of(x), tf.float32),
    "positions": lambda x, _: x + tf.gather(TABLE, tf.range(rows_of(x))),
    "first": lambda x, _: x + x[:1],
    "reverse": lambda x, _: x[::-1],
    "roll": lambda x, _: tf.roll(x, 1, 0),
    "outer": lambda x, _: x + tf.reduce_sum(x[:, :1] * x[:, 0], 1, True),
    "gram": lambda x, _: tf.matmul(tf.matmul(x, x, transpose_b=True), x),
    "gather": lambda x, i: x + tf.gather(x, tf.math.floormod(i["k"], tf.cast(rows_of(x), tf.int64))),
    "turned": lambda x, _: tf.reshape(tf.transpose(x), tf.shape(x)),
    "segments": lambda x, i: tf.math.unsorted_segment_sum(x, i["k"] % 2, rows_of(x)),
    "branch by the batch size": lambda x, _: tf.cond(rows_of(x) > 3, lambda: x * 2, lambda: x),
    "branch by a sum": lambda x, _: tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2, lambda: x),
    "loop by rows": looped_by_rows,
    "loop by ids": looped_by_ids,
    "assertion of all": asserted_of_all,
    "number of entries": lambda x, i: x + tf.cast(tf.shape(tf.where(i["ids"] >= 0))[0], tf.float32),
    "shape of a mask": lambda x, i: x + tf.cast(tf.shape(tf.boolean_mask(x, i["flag"]))[0], tf.float32),
}
WRAPPERS: Final[dict[str, Callable[[Step], Step]]] = {
    "plain": lambda step: step,
    "cond of any": lambda step: lambda x, i: tf.cond(tf.reduce_any(i["flag"]), lambda: step(x, i), lambda: x),
    "cond of all": lambda step: lambda x, i: tf.cond(tf.reduce_all(i["flag"]), lambda: step(x, i), lambda: x),
    "where": lambda step: lambda x, i: tf.where(i["flag"][:, None], step(x, i), x),
    "loop": lambda step: (
        lambda x, i: tf.while_loop(
            lambda n, _: n < 2, lambda n, y: (n + 1, tf.ensure_shape(step(y, i), [None, 4])), (tf.constant(0), x)
        )[1]
    ),
    "function": lambda step: lambda x, i: tf.function(step, autograph=False)(x, i),
}


def graph_of(step: Step) -> RowGraph:
    return RowGraph(lambda **inputs: step(inputs["x"], inputs), SPECS)


@pytest.mark.parametrize("name", APART)
def test_a_step_that_keeps_rows_apart_is_proven(name: str) -> None:
    with graph_of(APART[name]) as graph:
        assert graph.verdict.reason == ""
        assert graph.differences(draw_requests(random.Random(0)), 1e-5) == []


@pytest.mark.parametrize("name", MIXING)
def test_a_step_that_mixes_rows_is_refused(name: str) -> None:
    with graph_of(MIXING[name]) as graph:
        assert not graph.verdict.is_proven
        assert any(graph.differences(draw_requests(random.Random(seed))) for seed in range(12)) or name == "random"


def draw_steps(rng: random.Random) -> list[tuple[str, Step, bool]]:
    """Name, step, and whether it keeps rows apart for certain; branches by rows do not, whatever is in them."""
    steps = []
    mixing_at = rng.choice([None, 0, 1, 2, 3])
    for index in range(rng.randint(2, 5)):
        mixes = index == mixing_at
        name = rng.choice(sorted(MIXING if mixes else APART))
        wrapper = rng.choice(sorted(WRAPPERS)) if mixes or rng.random() < 0.3 else "plain"
        step = WRAPPERS[wrapper]((MIXING if mixes else APART)[name])
        steps.append((f"{wrapper} {name}", step, not mixes and not wrapper.startswith("cond")))
    return steps


def draw_requests(rng: random.Random) -> list[dict[str, Any]]:
    width = rng.randint(1, 4)
    found = []
    for _ in range(rng.randint(2, 4)):
        own, rows = np.random.default_rng(rng.getrandbits(32)), rng.randint(1, 3)
        found.append(
            {
                "x": own.normal(size=(rows, 4)).astype(np.float32),
                "k": own.integers(0, 64, rows),
                "ids": np.where(own.random((rows, width)) < 0.4, -1, own.integers(0, 64, (rows, width))),
                "flag": own.random(rows) < 0.4,
            }
        )
    return found


def built(steps: list[tuple[str, Step, bool]]) -> RowGraph:
    def step(x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        for _, each, _ in steps:
            x = each(x, inputs)
        return x

    return graph_of(step)


def test_random_graphs() -> None:
    """Each has a seed of its own. Hypothesis draws constants out of the modules that are loaded, also with `derandomize`."""
    kept_apart = 0
    for seed in range(120):
        rng = random.Random(seed)
        steps = draw_steps(rng)
        names = [f"seed {seed}", *(name for name, _, _ in steps)]
        is_apart = all(apart for _, _, apart in steps)
        kept_apart += is_apart
        with built(steps) as graph:
            reason = graph.verdict.reason
            assert not (is_apart and reason), f"{names}: {reason}"
            for _ in range(0 if reason else 3):
                # Sums behind others may cancel out: rounding is measured by a share of the largest number.
                assert graph.differences(draw_requests(rng), 1e-5) == [], names
    assert 20 < kept_apart < 100
