"""Training steps traced for TPUs on a fabricated topology: what reaches TensorFlow's TPU ops, and what is refused."""

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.support.fake_tpu import fake_tpu
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.config import FTRL, SGD, Adam
from tpuembed.errors import ConfigError, TrainingError

BATCH = 16
USERS = TableConfig(100, 8, "users", combiner="mean")
VIDEOS = TableConfig(50, 8, "videos", combiner="sum")


def config(output_shape: Any = (BATCH,)) -> dict[str, FeatureConfig]:
    return {
        "seen": FeatureConfig(VIDEOS, output_shape=output_shape),
        "user": FeatureConfig(USERS, output_shape=output_shape),
    }


def sparse(hot: int = 5) -> Any:
    indices, values = tf.compat.v1.placeholder(tf.int64, [None, 2]), tf.compat.v1.placeholder(tf.int64, [None])
    return tf.SparseTensor(indices, values, tf.constant([BATCH, hot], tf.int64))


def inputs() -> dict[str, Any]:
    return {"seen": sparse(), "user": sparse()}


def ops() -> Any:
    """How often each op stands in the graph."""
    return collections.Counter(node.op for node in nodes())


def nodes() -> Any:
    return tf.compat.v1.get_default_graph().as_graph_def().node


@contextlib.contextmanager
def traced(
    feature: str, replicas: int = 1, features: Any = None, step_inputs: Any = None, **arguments: Any
) -> Iterator[Any]:
    """A layer whose training step was traced."""
    with fake_tpu(feature, replicas) as strategy:
        with strategy.scope():
            layer = TPUEmbedding(config() if features is None else features, **{"optimizer": "adagrad", **arguments})
        train_in(strategy, layer, inputs() if step_inputs is None else step_inputs())
        yield layer


def train_in(strategy: Any, layer: Any, features: Any) -> None:
    def step(features: Any) -> Any:
        with tf.GradientTape() as tape:
            activations = tf.nest.flatten(layer(features))
            loss = tf.add_n([tf.reduce_sum(activation**2) for activation in activations])
        gradients = tape.gradient(loss, layer.trainable_variables)
        layer.apply_gradients(gradients)  # of replicated tables; those of an accelerator moved with the gradient
        return gradients

    strategy.run(step, args=(features,))


# ---- what is traced

V1_OPS = {
    "EnqueueTPUEmbeddingArbitraryTensorBatch": 1,
    "RecvTPUEmbeddingActivations": 1,
    "SendTPUEmbeddingGradients": 1,
}
V2_OPS = {
    "ConvertToListOfSparseCoreCooTensors": 2,
    "SortListOfSparseCoreCooTensors": 4,
    "ConvertToSparseCoreCsrWrappedCooTensor": 1,
    "XlaSparseDenseMatmulWithStaticBufferSize": 1,
    "XlaSparseDenseMatmulGradWithAdagradAndStaticBufferSize": 1,
}
REPLICATED_OPS = {"SparseToDense": 2, "ResourceGather": 4, "ResourceScatterUpdate": 4}
MARKS = ("Embedding", "SparseCore", "Xla", "SparseToDense", "ResourceGather", "ResourceScatter")


def marked() -> dict[str, int]:
    return {op: count for op, count in ops().items() if any(mark in op for mark in MARKS)}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("feature", "expected"), [("V1", V1_OPS), ("V2", V2_OPS), ("UNSUPPORTED", REPLICATED_OPS)])
def test_a_step_is_made_of_the_hardwares_ops(feature: str, expected: dict[str, int], replicas: int) -> None:
    with traced(feature, replicas):
        assert marked() == expected
        # Copies of a table stay equal only if every replica sees all gradients.
        assert bool(ops()["CrossReplicaSum"]) == (feature == "UNSUPPORTED" and replicas > 1)


@pytest.mark.parametrize("feature", ["V1", "V2"])
def test_unsupported_may_be_asked_for_on_any_tpu(feature: str) -> None:
    with traced(feature, embedding_feature=tf.tpu.experimental.HardwareFeature.EmbeddingFeature.UNSUPPORTED):
        assert marked() == REPLICATED_OPS


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("feature", "of_one"), [("V1", V1_OPS), ("V2", {**V2_OPS, "ConvertToListOfSparseCoreCooTensors": 1})]
)
def test_tables_up_to_the_threshold_are_replicated(feature: str, of_one: dict[str, int], replicas: int) -> None:
    small = {"SparseToDense": 1, "ResourceGather": 2, "ResourceScatterUpdate": 2}
    with traced(feature, replicas, size_threshold=50) as layer:
        assert marked() == {**of_one, **small}
        assert [weight.shape for weight in layer.weights] == [(1,), (50, 8), (50, 8), ()]


def test_all_tables_up_to_the_threshold() -> None:
    with (
        pytest.warns(UserWarning, match="pipeline_execution_with_tensor_core has no effect"),
        traced("V1", size_threshold=100, pipeline_execution_with_tensor_core=True),
    ):
        assert marked() == REPLICATED_OPS


@pytest.mark.parametrize("feature", ["V1", "V2", "UNSUPPORTED"])
def test_the_step_of_fit(feature: str) -> None:
    with fake_tpu(feature, 2) as strategy:
        with strategy.scope():
            layer = TPUEmbedding(config(), optimizer="adagrad", size_threshold=50)
            symbols = {
                name: keras.Input((5,), batch_size=BATCH, sparse=True, dtype="int64", name=name)
                for name in ("seen", "user")
            }
            embedded = layer(symbols)
            outputs = keras.layers.Dense(1)(keras.ops.concatenate([embedded["seen"], embedded["user"]], -1))
            model = keras.Model(symbols, outputs)
            model.compile("adam", "mse")
        target = tf.compat.v1.placeholder(tf.float32, [BATCH, 1])
        strategy.run(lambda x, y: model.train_step((x, y)), args=(inputs(), target))
        found = marked()
        assert found["ResourceScatterUpdate"] == (4 if feature == "UNSUPPORTED" else 2)
        assert found.get("SendTPUEmbeddingGradients", 0) == (feature == "V1")
        assert found.get("XlaSparseDenseMatmulGradWithAdagradAndStaticBufferSize", 0) == (feature == "V2")
        assert ops()["CrossReplicaSum"], "the dense weights' gradients are summed"


@pytest.mark.parametrize("feature", ["V1", "V2", "UNSUPPORTED"])
def test_a_step_without_gradients_updates_nothing(feature: str) -> None:
    with fake_tpu(feature) as strategy:
        with strategy.scope():
            layer = TPUEmbedding(config(), optimizer="adagrad")
        strategy.run(lambda features: layer(features)["user"], args=(inputs(),))
        updates = ("Send", "Grad", "Scatter", "AssignAdd")
        assert not [op for op in ops() if any(update in op for update in updates) and "Initialized" not in op]


# ---- what the hardware is told


def test_sparse_cores_stack_tables_and_get_their_limits() -> None:
    limited = TableConfig(100, 8, "users", max_ids_per_partition=64, max_unique_ids_per_partition=32)
    features = {
        "seen": FeatureConfig(VIDEOS, output_shape=(BATCH,)),
        "user": FeatureConfig(limited, output_shape=(BATCH,)),
    }
    with traced("V2", 2, features):
        [node] = [n for n in nodes() if n.op == "XlaSparseDenseMatmulWithStaticBufferSize"]
        assert node.attr["table_name"].s == b"users_videos"
        assert node.attr["max_ids_per_sparse_core"].i == 64 + 256  # 256: TensorFlow's default, for the other table
        assert node.attr["max_unique_ids_per_sparse_core"].i == 32 + 256
        assert node.attr["input_size"].i == 2 * BATCH


@pytest.mark.filterwarnings("ignore:The 'warn' function is deprecated:DeprecationWarning")  # TensorFlow's own
def test_sparse_cores_take_the_stacks_limits_from_their_config_first() -> None:
    stacking = tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig(
        disable_table_stacking=True, max_ids_per_table={"users": 7}, max_unique_ids_per_table={"users": 5}
    )
    limited = TableConfig(100, 8, "users", max_ids_per_partition=64, max_unique_ids_per_partition=32)
    with traced(
        "V2",
        features={"user": FeatureConfig(limited, output_shape=(BATCH,))},
        step_inputs=lambda: {"user": sparse()},
        sparse_core_embedding_config=stacking,
    ):
        [node] = [n for n in nodes() if n.op == "XlaSparseDenseMatmulWithStaticBufferSize"]
        assert (node.attr["max_ids_per_sparse_core"].i, node.attr["max_unique_ids_per_sparse_core"].i) == (7, 5)


# ---- what is refused


@contextlib.contextmanager
def setup_refused(feature: str, error: Any, match: str, **arguments: Any) -> Iterator[None]:
    with fake_tpu(feature) as strategy, strategy.scope(), pytest.raises(error, match=match):
        TPUEmbedding(**{"feature_config": config(), "optimizer": "adagrad", **arguments})
    yield


@pytest.mark.parametrize(
    ("feature", "arguments", "match"),
    [
        (
            "V1",
            {"embedding_feature": "V2"},
            "embedding_feature=V2 needs .* has TPUs with embedding hardware V1",
        ),
        ("UNSUPPORTED", {"embedding_feature": "V1"}, "embedding_feature=V1 .* hardware UNSUPPORTED"),
        ("V1", {"optimizer": None}, "table 'videos': it has no optimizer"),
        ("V2", {"optimizer": None}, "table 'videos': it has no optimizer"),
        ("V2", {"feature_config": config(None)}, "feature 'seen': .*need the shape of its activations .* batch_size"),
        (
            "V2",
            {"feature_config": {"a": FeatureConfig(USERS, max_sequence_length=3)}},
            "feature 'a': max_sequence_length is not supported by the TPU's SparseCores",
        ),
        ("V2", {"optimizer": SGD(clip_weight_min=0.0)}, r"table 'videos': SGD\(clip_weight_min=0.0\) is not supported"),
        ("V2", {"optimizer": SGD(clip_weight_max=0.0)}, r"SGD\(clip_weight_max=0.0\)"),
        ("V2", {"optimizer": SGD(clipvalue=1.0)}, r"SGD\(clipvalue="),
        ("V2", {"optimizer": SGD(weight_decay_factor=0.1)}, r"SGD\(weight_decay_factor=0.1\)"),
        ("V2", {"optimizer": Adam(lazy_adam=False)}, r"Adam\(lazy_adam=False\)"),
        ("V2", {"optimizer": FTRL(allow_zero_accumulator=True)}, r"FTRL\(allow_zero_accumulator=True\)"),
        (
            "V2",
            {"optimizer": FTRL(initial_accumulator_value=0.0, allow_zero_accumulator=True)},
            "optimizer ftrl: embedding accelerators do not support it",
        ),
        ("V2", {"optimizer": SGD(use_gradient_accumulation=False)}, r"SGD\(use_gradient_accumulation=False\)"),
        (
            "V1",
            {"feature_config": {"a": FeatureConfig(TableConfig(2**31, 8, "t"), output_shape=(4,))}},
            r"table 't': it has 2147483648 rows\. .* takes ids as int32",
        ),
    ],
)
def test_refused_when_the_layer_is_built(feature: str, arguments: dict[str, Any], match: str) -> None:
    with setup_refused(feature, ConfigError, match, **arguments):
        pass


@pytest.mark.parametrize("policy", ["zeros", 0, 7])
@pytest.mark.parametrize("of_table", [True, False])
@pytest.mark.sampled(2)
def test_ids_outside_of_a_table_fail_on_v1_and_nothing_else(policy: str | int, of_table: bool) -> None:
    """The hardware has no row for them. A table beside it has."""
    table = TableConfig(50, 8, "videos", combiner="sum", out_of_vocabulary=policy if of_table else "error")
    one = FeatureConfig(table, output_shape=(BATCH,), out_of_vocabulary=None if of_table else policy)
    features = {"seen": one, "user": config()["user"]}
    with fake_tpu("V1") as strategy, strategy.scope():
        with pytest.raises(ConfigError) as caught:
            TPUEmbedding(features, "adagrad")
        assert str(caught.value) == (
            f"feature 'seen': out_of_vocabulary={policy!r} is not supported by the TPU's embedding accelerator. Map such "
            "ids in the input pipeline, or set size_threshold to replicate its table."
        )
        TPUEmbedding(config(), "adagrad")  # what was refused has not taken the accelerator
    for arguments in ({"size_threshold": 50}, {"embedding_feature": "UNSUPPORTED"}):
        with traced("V1", features=features, step_inputs=inputs, **arguments):
            pass


@pytest.mark.parametrize("feature", ["V1", "V2"])
def test_one_call_per_step(feature: str) -> None:
    with fake_tpu(feature) as strategy:
        with strategy.scope():
            layer = TPUEmbedding(config(), optimizer="adagrad")
        with refused(TrainingError):
            strategy.run(lambda features: [layer(features), layer(features)], args=(inputs(),))


def test_one_layer_has_the_accelerator() -> None:
    with fake_tpu("V1") as strategy, strategy.scope():
        first = TPUEmbedding(config(), optimizer="adagrad")
        with refused(TrainingError):
            TPUEmbedding(config(), optimizer="adagrad")
        TPUEmbedding(config(), optimizer="adagrad", embedding_feature="UNSUPPORTED")
        del first


@pytest.mark.parametrize("feature", ["V1", "V2"])
def test_called_outside_of_a_step(feature: str) -> None:
    with fake_tpu(feature) as strategy:
        with strategy.scope():
            layer = TPUEmbedding(config(), optimizer="adagrad")
        with refused(TrainingError, match="created under TPUStrategy"):
            layer(inputs())


@pytest.mark.parametrize("feature", ["V1", "V2", "UNSUPPORTED"])
def test_created_under_one_strategy_and_called_under_another(feature: str) -> None:
    with fake_tpu(feature) as strategy:
        layer = TPUEmbedding(config(), optimizer="adagrad")
        match = r"created under DefaultDistributionStrategy with 1 replica and .* under TPUStrategy"
        with pytest.raises(RuntimeError, match=match):
            strategy.run(layer, args=(inputs(),))


def test_v1_takes_sparse_or_ragged_ids() -> None:
    def mixed() -> dict[str, Any]:
        splits = tf.compat.v1.placeholder(tf.int64, [BATCH + 1])
        ragged = tf.RaggedTensor.from_row_splits(tf.compat.v1.placeholder(tf.int64, [None]), splits, validate=False)
        return {"seen": sparse(), "user": ragged}

    with (
        refused(ConfigError, match="feature 'seen'"),
        traced("V1", step_inputs=mixed),
    ):
        pass
    with traced("V2", step_inputs=mixed):
        assert ops()["ConvertToListOfSparseCoreCooTensors"] == 2


@pytest.mark.parametrize("feature", ["V1", "V2"])
def test_a_serving_config_is_for_the_host(feature: str) -> None:
    with fake_tpu(feature) as strategy:
        with strategy.scope():
            layer = TPUEmbedding(config(), optimizer="adagrad")
        serving = {"only": FeatureConfig(USERS)}
        with refused(TrainingError, match="serving_config"):
            strategy.run(lambda ids: layer({"only": ids}, serving_config=serving), args=(sparse(),))


def test_a_layers_config_keeps_what_accelerators_are_told() -> None:
    stacking = tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig(max_ids_per_table={"users_videos": 7})
    arguments: dict[str, Any] = {"pipeline_execution_with_tensor_core": True, "batch_size": 16, "size_threshold": 10}
    with fake_tpu("V2") as strategy, strategy.scope():
        layer = TPUEmbedding(config(), "adagrad", sparse_core_embedding_config=stacking, **arguments)
        again = TPUEmbedding.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert again.core.options.sparse_core_config == stacking
    assert {name: again.get_config()[name] for name in arguments} == arguments


# ---- pipelining


def pipelining_marks(graph: Any) -> set[bytes]:
    definition = graph.as_graph_def()
    found = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return {node.attr["_embedding_pipelining"].s for node in found if "_embedding_pipelining" in node.attr}


def test_steps_are_not_pipelined_unless_they_are_to_be() -> None:
    with traced("V2"):
        assert pipelining_marks(tf.compat.v1.get_default_graph()) == set()


def pipelined(strategy: Any) -> TPUEmbedding:
    with strategy.scope():
        return TPUEmbedding(config(), "adagrad", pipeline_execution_with_tensor_core=True, batch_size=BATCH)


def dense_inputs() -> dict[str, Any]:
    return {name: tf.zeros([BATCH], tf.int64) for name in ("seen", "user")}


def test_pipelined_steps_in_a_loop_are_traced() -> None:
    with fake_tpu("V2") as strategy:
        layer = pipelined(strategy)

        @tf.function
        def steps() -> None:
            for _ in tf.range(3):
                train_in(strategy, layer, dense_inputs())

        assert pipelining_marks(steps.get_concrete_function().graph) == {b"forward", b"backward"}


def once(step: Any) -> None:
    step()


def conditional(step: Any) -> None:
    for index in tf.range(3):
        if index > 0:
            step()


def looped(step: Any) -> None:
    for _ in tf.range(3):
        step()


@pytest.mark.parametrize(("steps_of", "nested"), [(once, False), (conditional, False), (looped, True)])
@pytest.mark.parametrize("loop_inside", [False, True])
def test_a_pipelined_step_outside_of_a_loop_is_refused(loop_inside: bool, steps_of: Any, nested: bool) -> None:
    """A loop inside of the step is not one of steps, and TensorFlow takes nothing between loop and step."""
    with fake_tpu("V2") as strategy:
        layer = pipelined(strategy)

        def look_up() -> None:
            layer(dense_inputs())

        def look_up_often() -> None:
            for _ in tf.range(3):
                layer(dense_inputs())

        def step() -> None:
            strategy.run(look_up_often if loop_inside else look_up)

        called = tf.function(step) if nested else step

        @tf.function
        def steps() -> None:
            steps_of(called)

        with refused(TrainingError, match="strategy.run"):
            steps.get_concrete_function()


def test_a_v1_accelerator_pipelines_steps_outside_of_a_loop() -> None:
    """It keeps the order of its own steps."""
    with traced("V1", pipeline_execution_with_tensor_core=True):
        assert marked() == V1_OPS
