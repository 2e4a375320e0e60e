"""Small tables beside the accelerator's."""

import pytest
import tensorflow as tf

from tests.support.fake_tpu import fake_tpu
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.errors import ConfigError


@pytest.mark.parametrize(
    ("hardware", "op"),
    [("V1", "SendTPUEmbeddingGradients"), ("V2", "XlaSparseDenseMatmulGradWithSgdAndStaticBufferSize")],
)
def test_a_small_table_that_the_user_trains_is_no_second_call(hardware: str, op: str) -> None:
    large, small = TableConfig(100, 8, "large", optimizer="sgd"), TableConfig(5, 8, "small")
    features = {name: FeatureConfig(table, output_shape=(16,)) for name, table in (("a", large), ("b", small))}
    with fake_tpu(hardware) as strategy:
        with strategy.scope():
            layer = TPUEmbedding(features, size_threshold=10)

        def step(ids: object) -> object:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(activation) for activation in layer(ids).values()])
            return tape.gradient(loss, layer.trainable_variables)

        gradients = strategy.run(step, args=({name: tf.compat.v1.placeholder(tf.int32, [16]) for name in features},))
        assert len(gradients) == 2  # of the small table, and of the trap
        assert all(gradient is not None for gradient in gradients)
        ops = {node.op for node in tf.compat.v1.get_default_graph().as_graph_def().node}
    assert op in ops


@pytest.mark.parametrize("hardware", ["V1", "V2", "UNSUPPORTED"])
@pytest.mark.parametrize(("first", "second"), [("t", "t/momenta"), ("t/momenta", "t")])
def test_a_table_named_like_anothers_slot_is_refused_by_name(hardware: str, first: str, second: str) -> None:
    """On SparseCores tables of two widths, or else both of them are in one stack."""
    tables = {"a": TableConfig(100, 8, first), "b": TableConfig(100, 16, second)}
    features = {name: FeatureConfig(table, output_shape=(16,)) for name, table in tables.items()}
    with (
        fake_tpu(hardware) as strategy,
        strategy.scope(),
        refused(ConfigError, match="'t/momenta'"),
    ):
        TPUEmbedding(features, "adam")


def test_a_table_named_like_a_stacks_slot_is_refused_by_name() -> None:
    tables = [TableConfig(100, 8, "a"), TableConfig(100, 8, "b"), TableConfig(100, 16, "a_b/momenta")]
    features = {table.name: FeatureConfig(table, output_shape=(16,)) for table in tables}
    with fake_tpu("V2") as strategy, strategy.scope(), refused(ConfigError, match="table 'a_b/momenta'"):
        TPUEmbedding(features, "adam")
