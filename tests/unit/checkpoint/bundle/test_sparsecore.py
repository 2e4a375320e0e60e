"""SparseCore checkpoints: TensorFlow's own unshuffle as a second witness, and everything that must not be read."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2
from tensorflow.core.tpu.kernels import sparse_core_layout_pb2
from tensorflow.python.tpu import tpu_embedding_v3_utils

from tests.support.checkpoint.bundles import recorded, save
from tests.support.checkpoint.hand_made_bundles import write_stack
from tests.support.checkpoint.objects import mid_level
from tests.support.checkpoint.tpu_checkpoints import (
    EMBEDDING,
    SHAPES,
    features,
    layout_fields,
    random_values,
    serialized_layouts,
    sparse_core_embedding,
    write,
)
from tests.support.messages import refused
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError

GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"


def stored(prefix: Path, name: str) -> Any:
    """What TensorFlow reads of a child of the layer."""
    escaped = name.replace(".", "..").replace("/", ".S")
    return tf.train.load_checkpoint(str(prefix)).get_tensor(f"model/emb/{escaped}/.ATTRIBUTES/VARIABLE_VALUE")


@pytest.mark.parametrize("sparse_cores", [1, 2, 4])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_rows_are_those_that_tensorflow_unshuffles(tmp_path: Path, devices: int, sparse_cores: int) -> None:
    values = random_values(SHAPES, "ftrl")
    prefix = write(tmp_path / "ckpt", sparse_core_embedding(values, "ftrl", devices=devices, sparse_cores=sparse_cores))
    layouts = sparse_core_layout_pb2.SparseCoreTableLayouts.FromString(stored(prefix, "_sparse_core_table_layouts"))
    assert {layout.num_sparse_cores for layout in layouts.tables} == {devices * sparse_cores}
    with open_checkpoint(prefix) as checkpoint:
        assert checkpoint.format == "sparsecore"
        for layout in layouts.tables:
            for slot in (None, "accumulators", "linears"):
                stack = layout.stacked_table_name + ("" if slot is None else f"/{slot}")
                expected = tpu_embedding_v3_utils.remove_padding_from_sc(
                    tpu_embedding_v3_utils.unshuffle_from_sc_to_cpu(
                        tf.constant(stored(prefix, stack)),
                        layout.num_sparse_cores,
                        layout.sparse_core_shard_row_offset,
                        layout.unsharded_padded_shape[0] // layout.num_sparse_cores,
                        layout.sparse_core_shard_rotation,
                    ),
                    tuple(layout.unsharded_shape),
                )
                np.testing.assert_array_equal(checkpoint.read(layout.table_name, slot=slot), expected)


def test_what_describes_a_table(tmp_path: Path) -> None:
    prefix = write(tmp_path / "ckpt", sparse_core_embedding(random_values(SHAPES, "sgd"), "sgd", devices=2))
    with open_checkpoint(prefix) as checkpoint:
        layouts = {name: info.layout for name, info in checkpoint.tables().items()}
        assert [recorded(checkpoint, name) for name in SHAPES] == [None] * len(SHAPES)
    assert layouts == {
        "a": "stack a_b_d, 8 SparseCores",
        "b": "stack a_b_d, 8 SparseCores, rotation 4",
        "c": "8 SparseCores",
        "d": "stack a_b_d, 8 SparseCores",
        "video/e.1": "8 SparseCores",
    }


def test_an_aligned_lone_table_that_tensorflow_restores_permuted(tmp_path: Path) -> None:
    """Into a built layer TensorFlow loads [128, 8] of 8 SparseCores as they lie, and does not say so."""
    values = random_values({"t": (128, 8)}, "sgd")
    prefix = write(tmp_path / "ckpt", sparse_core_embedding(values, "sgd", devices=2))
    layer = EMBEDDING.TPUEmbeddingForServing(features({"t": (128, 8)}), None)
    layer.build()
    tf.train.Checkpoint(model=tf.train.Checkpoint(emb=layer)).restore(str(prefix))
    [restored] = layer.embedding_tables.values()
    truth = values["t"]["parameters"]
    assert not np.array_equal(restored.numpy(), truth)
    with open_checkpoint(prefix) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("t"), truth)


def rewritten(prefix: Path, change: Any, drop: str = "\0") -> str:
    """The checkpoint with another object graph: `change` is given the message."""
    reader = tf.train.load_checkpoint(str(prefix))
    tensors = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if drop not in name}
    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(tensors[GRAPH_KEY])
    change(graph)
    return save(prefix.with_name("rewritten"), {**tensors, GRAPH_KEY: graph.SerializeToString()})


def layer_node(graph: Any) -> Any:
    [node] = [node for node in graph.nodes if "_table_config" in {child.local_name for child in node.children}]
    return node


def without_layouts(graph: Any) -> None:
    node = layer_node(graph)
    kept = [child for child in node.children if child.local_name != "_sparse_core_table_layouts"]
    del node.children[:]
    node.children.extend(kept)


def test_sparse_cores_that_could_pass_for_hosts(tmp_path: Path) -> None:
    """Two devices' slices, and no layouts: nothing says which class cut them."""
    prefix = write(tmp_path / "ckpt", sparse_core_embedding(random_values(SHAPES, "sgd"), "sgd", devices=2))
    reader = tf.train.load_checkpoint(str(prefix))
    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(reader.get_tensor(GRAPH_KEY))
    without_layouts(graph)
    # TensorFlow's merge keeps the slices as they are, so only the graph is another one.
    kept = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if name != GRAPH_KEY}
    parts = [save(tmp_path / "graph", {GRAPH_KEY: graph.SerializeToString()})]
    for half in (0, 1):
        tables = {name: rows for name, rows in kept.items() if getattr(rows, "ndim", 0) == 2}
        cut = {name: np.split(rows, 2)[half] for name, rows in tables.items()}
        specs = {
            name: f"{len(rows)} {rows.shape[1]} {half * len(rows) // 2},{len(rows) // 2}:-"
            for name, rows in tables.items()
        }
        parts.append(save(tmp_path / f"half{half}", cut, specs))
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=str(tmp_path / "merged"))
    with refused(CheckpointFormatError):
        open_checkpoint(tmp_path / "merged")


def test_layouts_on_what_hosts_have_signed(tmp_path: Path) -> None:
    def sign(graph: Any) -> None:
        layer_node(graph).registered_saver.name = "tf.TPUEmbeddingCallback"

    prefix = write(tmp_path / "ckpt", sparse_core_embedding(random_values(SHAPES, "sgd"), "sgd", devices=2))
    with refused(CheckpointFormatError):
        open_checkpoint(rewritten(prefix, sign))


def test_layouts_that_the_index_has_lost(tmp_path: Path) -> None:
    prefix = write(tmp_path / "ckpt", sparse_core_embedding(random_values(SHAPES, "sgd"), "sgd", devices=1))
    with refused(CheckpointCorruptError):
        open_checkpoint(rewritten(prefix, lambda _: None, drop="_sparse_core_table_layouts"))


def test_stack_in_column_slices(tmp_path: Path) -> None:
    """TensorFlow can be told to cut any variable into files of a size, by columns too."""
    values = random_values(SHAPES, "adagrad")
    root = tf.train.Checkpoint(emb=sparse_core_embedding(values, "adagrad", devices=2))
    policy = tf.train.experimental.MaxShardSizePolicy(max_shard_size=3_000)
    prefix = root.write(str(tmp_path / "ckpt"), tf.train.CheckpointOptions(experimental_sharding_callback=policy))
    assert len(list(tmp_path.glob("*.data-*"))) > 10
    with open_checkpoint(prefix) as checkpoint:
        for name, roles in values.items():
            np.testing.assert_array_equal(checkpoint.read(name), roles["parameters"])
            np.testing.assert_array_equal(checkpoint.read(name, 2, slot="accumulators"), roles["accumulators"][2:])


def hand_made(tmp_path: Path, layouts: bytes, **stacks: Any) -> str:
    """A layer of stacks "parameters" by name, or of several variables each, with serialized `layouts`."""
    roles = {
        name: stack if isinstance(stack, dict) else {"parameters": tf.Variable(stack)} for name, stack in stacks.items()
    }
    children = {name: variables["parameters"] for name, variables in roles.items()}
    node = mid_level(roles, **children, _sparse_core_table_layouts=tf.Variable(layouts))
    return str(tf.train.Checkpoint(layer=node).write(str(tmp_path / "ckpt")))


B = layout_fields("b", sparse_core_shard_row_offset=8, sparse_core_shard_rotation=2)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_a_stack_of_any_dtype_keeps_it(tmp_path: Path, dtype: str) -> None:
    stack = tf.cast(tf.reshape(tf.range(96 * 8), (96, 8)) % 251, dtype).numpy()
    with open_checkpoint(hand_made(tmp_path, serialized_layouts(layout_fields(), B), a_b=stack)) as checkpoint:
        for name, offset, rotation in (("a", 0, 0), ("b", 8, 2)):
            expected = [stack[(row + rotation) % 4 * 24 + offset + row // 4, :6] for row in range(20)]
            found = checkpoint.read(name)
            assert found.dtype == stack.dtype == checkpoint.tables()[name].dtype
            np.testing.assert_array_equal(found, np.array(expected))


def test_slots_of_another_shape(tmp_path: Path) -> None:
    roles = {"parameters": tf.Variable(tf.zeros((96, 8))), "accumulators": tf.Variable(tf.zeros((20, 6)))}
    with refused(CheckpointCorruptError, match="table 'a'"):
        open_checkpoint(hand_made(tmp_path, serialized_layouts(layout_fields(), B), a_b=roles))


@pytest.mark.parametrize("shape", [(96, 16), (95, 8), (192, 8), (20, 6), (8, 96)])
def test_a_stack_that_is_not_what_its_layout_says(tmp_path: Path, shape: tuple[int, int]) -> None:
    with refused(CheckpointCorruptError, match=r"stack 'a_b'"):
        open_checkpoint(hand_made(tmp_path, serialized_layouts(layout_fields(), B), a_b=tf.zeros(shape)))


def test_stacks_without_a_layout(tmp_path: Path) -> None:
    with refused(CheckpointCorruptError, match="stack 'c'"):
        open_checkpoint(
            hand_made(tmp_path, serialized_layouts(layout_fields(), B), a_b=tf.zeros((96, 8)), c=tf.zeros((96, 8)))
        )


def test_layouts_without_a_stack(tmp_path: Path) -> None:
    with refused(CheckpointFormatError):
        open_checkpoint(
            hand_made(tmp_path, serialized_layouts(layout_fields(), B, layout_fields("x", "x")), a_b=tf.zeros((96, 8)))
        )


def test_a_table_of_two_layers(tmp_path: Path) -> None:
    """On SparseCores in one, on CPU in the other."""
    stack = tf.Variable(tf.zeros((96, 8)))
    cores = mid_level(
        {"a_b": {"parameters": stack}},
        a_b=stack,
        _sparse_core_table_layouts=tf.Variable(serialized_layouts(layout_fields(), B)),
    )
    other = mid_level({"a": {"parameters": tf.Variable(tf.zeros((5, 2)))}})
    prefix = tf.train.Checkpoint(one=cores, two=other).write(str(tmp_path / "ckpt"))
    with refused(CheckpointFormatError, match="table 'a'"):
        open_checkpoint(prefix)


def test_layers_of_different_hardware(tmp_path: Path) -> None:
    stack = tf.Variable(tf.reshape(tf.range(96.0 * 8), (96, 8)))
    layouts = tf.Variable(serialized_layouts(layout_fields(), B))
    cores = mid_level({"a_b": {"parameters": stack}}, a_b=stack, _sparse_core_table_layouts=layouts)
    other = mid_level({"small": {"parameters": tf.Variable(tf.ones((5, 2)))}})
    prefix = tf.train.Checkpoint(one=cores, two=other, kernel=tf.Variable(tf.ones((3, 3)))).write(
        str(tmp_path / "ckpt")
    )
    with open_checkpoint(prefix) as checkpoint:
        assert checkpoint.format == "dense+sparsecore"
        assert set(checkpoint.tables()) == {"a", "b", "small"}
        np.testing.assert_array_equal(checkpoint.read("small"), np.ones((5, 2)))
        np.testing.assert_array_equal(checkpoint.read("a", 3, 5), stack.numpy()[[72, 1], :6])


def test_keras_2_slots(tmp_path: Path) -> None:
    """What a Keras 2 optimizer keeps for a stack lies as the stack does."""
    values = random_values({"a": (20, 6)}, "sgd")
    embedding = sparse_core_embedding(values, "sgd", devices=2)
    [stack] = [roles["parameters"] for roles in embedding._variables.values()]
    twice = tf.Variable(np.concatenate([2 * shard.numpy() for shard in stack.values]))
    prefix = Path(
        tf.train.Checkpoint(model=tf.train.Checkpoint(emb=embedding), kept=twice).write(str(tmp_path / "ckpt"))
    )

    def keep(graph: Any) -> None:
        nodes = {child.local_name: child.node_id for child in graph.nodes[0].children}
        children = {child.local_name: child.node_id for child in layer_node(graph).children}
        graph.nodes[0].slot_variables.add(
            original_variable_node_id=children["a"], slot_name="accumulator", slot_variable_node_id=nodes["kept"]
        )

    with open_checkpoint(rewritten(prefix, keep)) as checkpoint:
        assert checkpoint.tables()["a"].slots == ("accumulators",)
        np.testing.assert_array_equal(checkpoint.read("a", 1, slot="accumulators"), 2 * values["a"]["parameters"][1:])


@pytest.mark.parametrize(
    "changed",
    [
        {"num_sparse_cores": 0},
        {"num_sparse_cores": -4},
        {"num_partitions": 0},
        {"num_partitions": 3},
        {"total_rows_per_sparse_core_shard": 7},
        {"total_rows_per_sparse_core_shard": -1},
        {"unsharded_shape": [33, 6]},
        {"unsharded_shape": [20, 9]},
        {"unsharded_shape": [0, 6]},
        {"unsharded_shape": [-1, 6]},
        {"unsharded_shape": [20]},
        {"unsharded_shape": []},
        {"unsharded_padded_shape": [32, 8, 1]},
        {"unsharded_padded_shape": [30, 8]},
        {"sparse_core_shard_row_offset": 17},
        {"sparse_core_shard_row_offset": -1},
        {"sparse_core_shard_row_offset": 2**63 - 1},
        {"sparse_core_shard_rotation": 4},
        {"sparse_core_shard_rotation": -1},
        {"unsharded_shape": [2**63 - 1, 6]},
        {"unsharded_shape": [2**62, 6], "unsharded_padded_shape": [2**62, 8]},
        {"table_name": ""},
        {"stacked_table_name": ""},
    ],
)
def test_layouts_that_contradict_themselves(tmp_path: Path, changed: dict[str, Any]) -> None:
    with refused(CheckpointCorruptError):
        open_checkpoint(hand_made(tmp_path, serialized_layouts(layout_fields(**changed)), a_b=tf.zeros((96, 8))))


@pytest.mark.parametrize(
    "changed",
    [
        {"sparse_core_shard_row_offset": 7},
        {"sparse_core_shard_row_offset": 0},
        {"table_name": "a"},
        {"unsharded_padded_shape": [32, 32]},
        {"total_rows_per_sparse_core_shard": 48},
        {"num_sparse_cores": 8, "total_rows_per_sparse_core_shard": 12},
    ],
)
def test_layouts_that_contradict_each_other(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Two stacks of one name among them: tables a and b of 16 columns make "a_b", and a table "a_b" of 32 does."""
    with refused(CheckpointCorruptError):
        open_checkpoint(
            hand_made(tmp_path, serialized_layouts(layout_fields(), {**B, **changed}), a_b=tf.zeros((96, 8)))
        )


@pytest.mark.parametrize(
    ("layouts", "names"),
    [
        ([layout_fields()], "a"),
        ([B], "b"),
        ([layout_fields("b"), {**B, "table_name": "a"}], "b_a"),
        ([layout_fields(sparse_core_shard_row_offset=8), {**B, "sparse_core_shard_row_offset": 0}], "b_a"),
        ([layout_fields(), {**B, "table_name": "c"}], "a_c"),
    ],
    ids=["the second is missing", "the first is missing", "names swapped", "places swapped", "renamed"],
)
def test_layouts_that_contradict_the_name_of_their_stack(tmp_path: Path, layouts: list[Any], names: str) -> None:
    with refused(CheckpointCorruptError, match=f"'{names}'"):
        open_checkpoint(hand_made(tmp_path, serialized_layouts(*layouts), a_b=tf.zeros((96, 8))))


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\xff\xff\xff\xff\x0f", b"\x0b", b"\xff" * 20, b"\x0a\x02\x0a\x05"])
def test_layouts_that_do_not_parse(tmp_path: Path, data: bytes) -> None:
    with refused(CheckpointCorruptError):
        open_checkpoint(hand_made(tmp_path, data, a_b=tf.zeros((96, 8))))


def test_absurdly_many_sparse_cores_take_no_memory(tmp_path: Path) -> None:
    """A sparse file can hold a stack of 2^30 shards of one row; what is read of it takes as much as is asked for."""
    cores = 1 << 30
    write_stack(
        tmp_path / "ckpt",
        layout_fields(
            "t",
            "t",
            num_sparse_cores=cores,
            num_partitions=1,
            total_rows_per_sparse_core_shard=1,
            unsharded_shape=[cores - 1, 1],
            unsharded_padded_shape=[cores, 1],
            sparse_core_shard_rotation=3,
        ),
    )
    script = (
        "import sys, resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from tpuembed.checkpoint import open_checkpoint\n"
        "with open_checkpoint(sys.argv[1]) as c: assert not c.read('t', (1 << 30) - 9, (1 << 30) - 1).any()"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "ckpt")], check=True, timeout=20)
