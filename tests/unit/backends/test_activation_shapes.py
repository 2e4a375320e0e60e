"""What decides an activation's shape under TPUs, on each kind of them: output_shape, then build()'s shapes, then the ids."""

from typing import Any

import pytest
import tensorflow as tf

from tests.support.fake_tpu import fake_tpu
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.errors import ConfigError

HARDWARE = ("V1", "V2", "UNSUPPORTED")
TABLE = TableConfig(100, 8, "t")


def dense(*shape: int | None) -> Any:
    return lambda: tf.compat.v1.placeholder(tf.int32, shape)


def sparse(examples: int | None) -> Any:
    def make() -> Any:
        shape = tf.compat.v1.placeholder(tf.int64, [2]) if examples is None else tf.constant([examples, 5], tf.int64)
        indices, values = tf.compat.v1.placeholder(tf.int64, [None, 2]), tf.compat.v1.placeholder(tf.int64, [None])
        return tf.SparseTensor(indices, values, shape)

    return make


def shape_of(hardware: str, ids: Any, build: Any = None, batch_size: int | None = None, **feature: Any) -> Any:
    """The leading shape of the activations of a call, on V1 what the accelerator is told of them."""
    with fake_tpu(hardware) as strategy:
        with strategy.scope():
            layer = TPUEmbedding({"x": FeatureConfig(TABLE, **feature)}, "sgd", batch_size=batch_size)
        if build is not None:
            layer.build({"x": build})
        shapes: list[Any] = []
        strategy.run(lambda given: shapes.append(layer(given)["x"].shape), args=({"x": ids()},))
        if hardware == "V1":
            backend: Any = layer.core.backend
            [told] = backend.engine.configuration.feature_descriptor
            return tuple(told.input_shape)
        return tuple(shapes[0])[:-1]


@pytest.mark.parametrize("hardware", ["V1", "UNSUPPORTED"])  # SparseCores are told when the layer is built
@pytest.mark.parametrize(
    ("ids", "build", "feature", "shape"),
    [
        (dense(None), (16,), {}, (16,)),
        (dense(None, 3), (16, None), {}, (16, 3)),
        (sparse(None), (16, 5), {}, (16,)),
        (sparse(None), (16, None), {"max_sequence_length": 3}, (16, 3)),
        (sparse(None), (16, 5), {"output_shape": (None,)}, (16,)),
        (dense(None, None), (None, 3), {"output_shape": (16, None)}, (16, 3)),
        (sparse(16), None, {}, (16,)),
    ],
)
def test_what_is_not_known_of_the_ids_comes_from_build(
    hardware: str, ids: Any, build: Any, feature: Any, shape: Any
) -> None:
    assert shape_of(hardware, ids, build, **feature) == shape


@pytest.mark.parametrize(
    ("hardware", "ids", "feature", "shape"),
    [
        ("V1", dense(None, 3), {}, (16, 3)),
        ("V1", dense(None, 3), {"output_shape": (None, 3)}, (16, 3)),
        ("V2", dense(None, 3), {"output_shape": (None, 3)}, (16, 3)),
        ("V2", dense(None), {}, (16,)),
    ],
)
def test_a_batch_size_says_how_many_examples(hardware: str, ids: Any, feature: Any, shape: Any) -> None:
    assert shape_of(hardware, ids, batch_size=16, **feature) == shape


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize(
    ("ids", "build", "output_shape"),
    [
        (dense(None), (8,), (16,)),
        (dense(16), (8,), (16,)),
        (sparse(16), (8, 5), (16,)),
        (dense(16, 3), None, (48,)),
        (dense(16, 3), None, (4, 12)),
        (sparse(16), None, (16, 4)),
    ],
)
def test_contradictions_are_refused_alike(hardware: str, ids: Any, build: Any, output_shape: Any) -> None:
    with refused(ConfigError) as error:
        shape_of(hardware, ids, build, output_shape=output_shape)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("hardware", "ids", "build", "message"),
    [
        ("V1", dense(None), (8,), r"batch_size=16 \(of one replica\): the ids give activations of \(8,\)"),
        ("V2", dense(16, 3), None, r"have shape \(16, 3\)\. The accelerator was set up for \(16,\)"),
        ("V1", dense(None), None, None),
    ],
)
def test_a_batch_size_that_the_ids_contradict(hardware: str, ids: Any, build: Any, message: str | None) -> None:
    if message is None:
        with refused(ConfigError):
            shape_of(hardware, ids, build)
        return
    with pytest.raises(ConfigError, match=f"feature 'x': .*{message}"):
        shape_of(hardware, ids, build, batch_size=16)


def test_v1_takes_the_shapes_that_it_was_set_up_for() -> None:
    with fake_tpu("V1") as strategy:
        with strategy.scope():
            layer = TPUEmbedding({"x": FeatureConfig(TABLE)}, "sgd")
        for size in (16, 16):
            strategy.run(layer, args=({"x": dense(size)()},))
        with refused(ConfigError, match="feature 'x'"):
            strategy.run(layer, args=({"x": dense(8)()},))


@pytest.mark.parametrize("hardware", HARDWARE)
def test_no_ids_are_refused_by_name(hardware: str) -> None:
    with refused(ConfigError, match="feature 'x'"):
        shape_of(hardware, lambda: None, output_shape=(16,))
