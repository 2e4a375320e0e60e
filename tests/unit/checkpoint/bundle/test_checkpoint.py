"""Which tables are found in checkpoints of hand-made objects, and what is refused by name."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.bundles import save
from tests.support.checkpoint.objects import GRAPH_KEY, Children, mid_level, with_registered_saver
from tests.support.checkpoint.tpu_checkpoints import layout_fields, serialized_layouts
from tests.support.messages import refused
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError


class OwnLayer(Children):
    """What the layer writes: its config as an attribute, tables and slots as children."""

    def __init__(self, config: str, **named: Any) -> None:
        super().__init__(**named)
        self._config = config

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {"tpuembed_config": tf.constant(self._config)}


def own_config(features: Any = None, **tables: tuple[int, int, Any]) -> str:
    as_dicts = {
        name.replace("__", "/"): {"vocabulary_size": rows, "dim": dim, "name": name, "optimizer": optimizer}
        for name, (rows, dim, optimizer) in tables.items()
    }
    return json.dumps({"tables": as_dicts, "features": features or {}})


def matrix(rows: int, dim: int) -> Any:
    return tf.Variable(tf.random.uniform((rows, dim)))


def write(path: Path, **roots: Any) -> str:
    return str(tf.train.Checkpoint(**roots).write(str(path / "ckpt")))


ADAGRAD = {"kind": "adagrad", "learning_rate": 0.1, "initial_accumulator_value": 0.1}


def test_a_table_that_is_called_like_a_slot(tmp_path: Path) -> None:
    layer = OwnLayer(
        own_config(a=(4, 2, None), a__accumulators=(3, 2, ADAGRAD)),
        a=matrix(4, 2),
        a__accumulators=matrix(3, 2),
        a__accumulators__accumulators=matrix(3, 2),
    )
    with open_checkpoint(write(tmp_path, layer=layer)) as checkpoint:
        tables = checkpoint.tables()
    assert {name: (info.rows, info.slots) for name, info in tables.items()} == {
        "a": (4, ()),
        "a/accumulators": (3, ("accumulators",)),
    }


@pytest.mark.parametrize(
    "table",
    [
        "a_b",
        "a_b__accumulators",
    ],
)
def test_a_table_that_is_called_like_a_stack(tmp_path: Path, table: str) -> None:
    """Of the stack's very size: its rows would be those of other tables, in the order of SparseCores."""
    second = layout_fields("b", sparse_core_shard_row_offset=8, sparse_core_shard_rotation=2)
    layouts = tf.Variable(serialized_layouts(layout_fields(), second))
    stacked = {"a": (20, 6, ADAGRAD), "b": (20, 6, ADAGRAD)}
    children = {"a_b": matrix(96, 8), "a_b__accumulators": matrix(96, 8), "_sparse_core_table_layouts": layouts}
    with open_checkpoint(write(tmp_path, layer=OwnLayer(own_config(**stacked), **children))) as checkpoint:
        assert set(checkpoint.tables()) == {"a", "b"}
    config = own_config(**stacked, **{table: (96, 8, None)})
    with refused(CheckpointCorruptError):
        open_checkpoint(write(tmp_path, layer=OwnLayer(config, **children)))


def test_a_table_that_is_the_slot_of_another(tmp_path: Path) -> None:
    config = own_config(a=(4, 2, ADAGRAD), a__accumulators=(4, 2, None))
    layer = OwnLayer(config, a=matrix(4, 2), a__accumulators=matrix(4, 2))
    with refused(CheckpointCorruptError, match="slot 'accumulators'"):
        open_checkpoint(write(tmp_path, layer=layer))


def test_configs_of_several_layers_are_merged(tmp_path: Path) -> None:
    layers = {
        "user": OwnLayer(own_config({"u": {"table": "a"}}, a=(4, 2, None)), a=matrix(4, 2)),
        "item": OwnLayer(own_config({"i": {"table": "b"}}, b=(5, 2, None)), b=matrix(5, 2)),
    }
    with open_checkpoint(write(tmp_path, **layers, again=layers["user"])) as checkpoint:
        assert set(checkpoint.tables()) == {"a", "b"}
        assert checkpoint.layer_config is not None
        assert set(checkpoint.layer_config["tables"]) == {"a", "b"}
        assert checkpoint.layer_config["features"] == {"u": {"table": "a"}, "i": {"table": "b"}}


def test_features_of_one_name_lie_under_their_layers(tmp_path: Path) -> None:
    layers = {
        "user": OwnLayer(own_config({"id": {"table": "a"}}, a=(4, 2, None)), a=matrix(4, 2)),
        "item": OwnLayer(own_config({"id": {"table": "b"}}, b=(5, 2, None)), b=matrix(5, 2)),
    }
    with open_checkpoint(write(tmp_path, **layers)) as checkpoint:
        assert checkpoint.layer_config is not None
        assert checkpoint.layer_config["features"] == {
            "item": {"id": {"table": "b"}},
            "user": {"id": {"table": "a"}},
        }


def test_tables_of_one_name_in_two_layers(tmp_path: Path) -> None:
    layers = {name: OwnLayer(own_config(a=(4, 2, None)), a=matrix(4, 2)) for name in ("user", "item")}
    with refused(CheckpointFormatError, match="table 'a'"):
        open_checkpoint(write(tmp_path, **layers))


@pytest.mark.parametrize(
    "config",
    [
        own_config(a=(5, 2, None)),
        own_config(a=(4, 3, None)),
        own_config(a=(4, 2, None), b=(4, 2, None)),
        own_config(a=(4, 2, ADAGRAD)),
        own_config(),
        "{",
        "[" * 100_000,
        "[]",
        '{"tables": {"a": 1}}',
    ],
)
def test_configs_that_contradict_the_tables(tmp_path: Path, config: str) -> None:
    with refused(CheckpointCorruptError):
        open_checkpoint(write(tmp_path, layer=OwnLayer(config, a=matrix(4, 2))))


@pytest.mark.parametrize(
    "slot", [tf.zeros((3, 2)), tf.zeros(4), tf.zeros((4, 2), tf.int32)], ids=["rows", "rank", "dtype"]
)
def test_slots_of_another_shape_or_dtype(tmp_path: Path, slot: Any) -> None:
    layer = OwnLayer(own_config(a=(4, 2, ADAGRAD)), a=matrix(4, 2), a__accumulators=tf.Variable(slot))
    with refused(CheckpointCorruptError, match=r"table 'a'"):
        open_checkpoint(write(tmp_path, layer=layer))


def test_a_table_that_is_no_matrix(tmp_path: Path) -> None:
    node = mid_level({"a": {"parameters": tf.Variable([1, 2])}})
    with refused(CheckpointCorruptError, match="table 'a'"):
        open_checkpoint(write(tmp_path, layer=node))


def test_a_table_without_parameters(tmp_path: Path) -> None:
    node = mid_level({"a": {"momenta": matrix(3, 2)}})
    with refused(CheckpointCorruptError, match="table 'a'"):
        open_checkpoint(write(tmp_path, layer=node))


@pytest.mark.parametrize("lost", ["a/.ATTRIBUTES", "tpuembed_config"])
def test_values_that_the_index_does_not_have(tmp_path: Path, lost: str) -> None:
    """The graph refers to a tensor that whoever rewrote the bundle left out."""
    prefix = write(tmp_path, layer=OwnLayer(own_config(a=(4, 2, None)), a=matrix(4, 2)))
    reader = tf.train.load_checkpoint(prefix)
    kept = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if lost not in name}
    with refused(CheckpointCorruptError):
        open_checkpoint(save(tmp_path / "kept", kept))


def with_slots(tmp_path: Path, *slots: str) -> str:
    """Matrices a, m1 and m2, of which an optimizer keeps `slots` for a, each under the name m."""
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    prefix = write(tmp_path, a=matrix(4, 2), m1=matrix(4, 2), m2=matrix(4, 2))
    reader = tf.train.load_checkpoint(prefix)
    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(reader.get_tensor(GRAPH_KEY))
    nodes = {child.local_name: child.node_id for child in graph.nodes[0].children}
    for slot in slots:
        graph.nodes[0].slot_variables.add(
            original_variable_node_id=nodes["a"], slot_name="m", slot_variable_node_id=nodes[slot]
        )
    tensors = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    return save(tmp_path / "slots", {**tensors, GRAPH_KEY: graph.SerializeToString()})


def test_slots_of_plain_variables_are_no_tables(tmp_path: Path) -> None:
    with open_checkpoint(with_slots(tmp_path, "m1")) as checkpoint:
        assert {name: info.slots for name, info in checkpoint.tables().items()} == {"a": ("momenta",), "m2": ()}


def test_two_optimizers_of_one_table(tmp_path: Path) -> None:
    with refused(CheckpointFormatError, match="'momenta'"):
        open_checkpoint(with_slots(tmp_path, "m1", "m2"))


def test_an_optimizer_of_a_later_version(tmp_path: Path) -> None:
    layer = OwnLayer(own_config(a=(4, 2, {"kind": "shampoo"})), a=matrix(4, 2))
    with refused(CheckpointFormatError, match="optimizer 'shampoo'"):
        open_checkpoint(write(tmp_path, layer=layer))


def test_a_layer_beside_dense_variables(tmp_path: Path) -> None:
    """Only the layer's tables are tables; what else is a matrix belongs to the dense part of the model."""
    layer = OwnLayer(own_config(a=(4, 2, None)), a=matrix(4, 2))
    with open_checkpoint(write(tmp_path, layer=layer, kernel=matrix(9, 9))) as checkpoint:
        assert set(checkpoint.tables()) == {"a"}
        assert checkpoint.layers is not None
        assert [weight.shape for weight in checkpoint.layers.objects({"a"}).weights().values()] == [(9, 9)]


def test_empty_sparse_core_layouts_are_no_layouts(tmp_path: Path) -> None:
    node = mid_level({"a": {"parameters": matrix(5, 2)}}, _sparse_core_table_layouts=tf.Variable(b""))
    with open_checkpoint(write(tmp_path, layer=node)) as checkpoint:
        assert set(checkpoint.tables()) == {"a"}


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_class_for_older_tpus(tmp_path: Path, hosts: int) -> None:
    table = np.arange(20, dtype=np.float32).reshape(10, 2)
    prefix = write(tmp_path, layer=mid_level({"a": {"parameters": tf.Variable(table)}}))
    graph = with_registered_saver(prefix, "tf.TPUEmbeddingCallback")
    [key] = [name for name, _ in tf.train.list_variables(prefix) if name != GRAPH_KEY]
    parts = [
        save(
            tmp_path / f"host{host}", {key: table[start : start + 10 // hosts]}, {key: f"10 2 {start},{10 // hosts}:-"}
        )
        for host, start in enumerate(range(0, 10, 10 // hosts))
    ]
    parts.append(save(tmp_path / "graph", {GRAPH_KEY: graph}))
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=str(tmp_path / "merged"))
    with open_checkpoint(tmp_path / "merged") as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("a"), table)
        assert checkpoint.tables()["a"].layout == ("" if hosts == 1 else "2 row slices")
        assert checkpoint.format == "tpu_v1"


def test_a_layer_that_was_never_built(tmp_path: Path) -> None:
    node = Children(_feature_config=Children(), _table_config=Children())
    with refused(CheckpointFormatError):
        open_checkpoint(write(tmp_path, layer=node, kernel=matrix(3, 3)))


def test_the_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    prefix = write(tmp_path, table=matrix(3, 3))
    seen = set()
    with open_checkpoint(prefix) as checkpoint:
        seen.add(checkpoint.fingerprint())
        assert checkpoint.fingerprint() in seen
        for ending in (".index", ".data-00000-of-00001"):
            status = Path(prefix + ending).stat()
            os.utime(prefix + ending, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
            seen.add(checkpoint.fingerprint())
        with open(prefix + ".data-00000-of-00001", "ab") as file:
            file.write(b"x")
        seen.add(checkpoint.fingerprint())
    assert len(seen) == 4


def test_a_checkpoint_that_another_takes_the_place_of(tmp_path: Path) -> None:
    """By TensorFlow, under the same name: the index that was read is not its own."""
    first, second = np.arange(30, dtype=np.float32).reshape(2, 5, 3)
    save(tmp_path / "ckpt", {"a": first, "b": first})
    with open_checkpoint(tmp_path / "ckpt") as untouched, open_checkpoint(tmp_path / "ckpt") as late:
        np.testing.assert_array_equal(untouched.read("a"), first)
        save(tmp_path / "ckpt", {"a": second, "b": second})
        np.testing.assert_array_equal(untouched.read("b"), first)  # whose file it has open
        with refused(CheckpointError, match="00000"):
            late.read("a")
    with open_checkpoint(tmp_path / "ckpt") as again:
        np.testing.assert_array_equal(again.read("a"), second)
