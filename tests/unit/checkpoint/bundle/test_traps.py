"""Checkpoints by TensorFlow's own classes that look like something that they are not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.bundles import save
from tests.support.checkpoint.objects import mid_level
from tests.support.checkpoint.tpu_checkpoints import (
    EMBEDDING,
    OPTIMIZERS,
    SHAPES,
    Values,
    features,
    host_embedding,
    layout_fields,
    random_values,
    serialized_layouts,
    serving_embedding,
    sparse_core_embedding,
    write,
)
from tests.support.messages import refused
from tpuembed.checkpoint import Checkpoint, open_checkpoint
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError

GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
CLASSES: dict[str, Callable[[Values], Any]] = {
    "serving": lambda values: serving_embedding(values, "adagrad"),
    "hosts": lambda values: host_embedding(values, "adagrad", 2),
    "sparse cores": lambda values: sparse_core_embedding(values, "adagrad", devices=2),
}


def check(checkpoint: Checkpoint, values: Values) -> None:
    for name, roles in values.items():
        assert checkpoint.tables()[name].slots == tuple(sorted(roles.keys() - {"parameters"}))
        for role, rows in roles.items():
            np.testing.assert_array_equal(checkpoint.read(name, slot=None if role == "parameters" else role), rows)


@pytest.mark.parametrize("made_by", CLASSES)
@pytest.mark.parametrize(
    "names",
    [("parameters", "accumulators"), ("a", "a.Saccumulators"), ("x/y", "x.Sy"), ("x.y", "x..y"), ("a", "a/parameters")],
    ids=str,
)
def test_names_that_look_like_slots_or_escapes(tmp_path: Path, made_by: str, names: tuple[str, str]) -> None:
    values = random_values(dict.fromkeys(names, (9, 4)), "adagrad")
    for role in ("parameters", "accumulators"):
        values[names[1]][role] += 1
    with open_checkpoint(write(tmp_path / "ckpt", CLASSES[made_by](values))) as checkpoint:
        assert set(checkpoint.tables()) == set(names)
        check(checkpoint, values)


@pytest.mark.parametrize("made_by", CLASSES)
def test_a_table_that_has_the_key_of_a_slot(tmp_path: Path, made_by: str) -> None:
    """TensorFlow itself refuses to make it, so no checkpoint can hold it."""
    values = random_values({"a": (9, 4), "a/accumulators": (9, 12)}, "adagrad")
    with pytest.raises(ValueError, match="accumulators"):
        write(tmp_path / "ckpt", CLASSES[made_by](values))


def test_a_table_in_a_stack_that_is_called_like_a_slot(tmp_path: Path) -> None:
    """The stack's key is another one, so this can be made."""
    values = random_values({"a": (9, 4), "a/accumulators": (20, 4)}, "adagrad")
    with open_checkpoint(write(tmp_path / "ckpt", CLASSES["sparse cores"](values))) as checkpoint:
        assert set(checkpoint.tables()) == {"a", "a/accumulators"}
        check(checkpoint, values)


def test_two_stacks_of_one_name_in_one_layer(tmp_path: Path) -> None:
    """Tables a and b share a stack a_b, and a table is called so: TensorFlow fails, and what would come of it is refused."""
    shapes = {"a": (20, 16), "b": (20, 16), "a_b": (20, 32)}
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):  # the second up to TensorFlow 2.19
        sparse_core_embedding(random_values(shapes, "sgd"), "sgd", devices=2)
    stacked = [layout_fields(), layout_fields("b", sparse_core_shard_row_offset=8, sparse_core_shard_rotation=2)]
    alone = layout_fields("a_b", sparse_core_shard_row_offset=16)
    stack = tf.Variable(tf.zeros((96, 8)))
    layouts = tf.Variable(serialized_layouts(*stacked, alone))
    node = mid_level({"a_b": {"parameters": stack}}, a_b=stack, _sparse_core_table_layouts=layouts)
    tf.train.Checkpoint(layer=node).write(str(tmp_path / "ckpt"))
    with refused(CheckpointCorruptError, match="stack 'a_b'"):
        open_checkpoint(tmp_path / "ckpt")


def test_two_stacks_of_one_name_in_two_layers(tmp_path: Path) -> None:
    pair = random_values({"a": (20, 16), "b": (37, 16)}, "adagrad")
    lone = random_values({"a_b": (50, 32)}, "adagrad")
    one, two = (sparse_core_embedding(values, "adagrad", devices=2) for values in (pair, lone))
    assert set(one._variables) == set(two._variables) == {"a_b"}
    tf.train.Checkpoint(one=one, two=two).write(str(tmp_path / "ckpt"))
    with open_checkpoint(tmp_path / "ckpt") as checkpoint:
        assert set(checkpoint.tables()) == {"a", "b", "a_b"}
        check(checkpoint, pair)
        check(checkpoint, lone)


def with_layouts_of(prefix: Path, layouts: bytes) -> Path:
    """The checkpoint of SparseCores with other serialized `layouts`; its slices stay as they were."""
    reader = tf.train.load_checkpoint(str(prefix))
    names = reader.get_variable_to_shape_map()
    [changed] = [name for name in names if "_sparse_core_table_layouts" in name]
    parts = [save(prefix.with_name("text"), {GRAPH_KEY: reader.get_tensor(GRAPH_KEY), changed: layouts})]
    stacks = {name: reader.get_tensor(name) for name, shape in names.items() if len(shape) == 2}
    for half in (0, 1):
        specs = {
            name: f"{len(rows)} {rows.shape[1]} {half * len(rows) // 2},{len(rows) // 2}:-"
            for name, rows in stacks.items()
        }
        cut = {name: np.split(rows, 2)[half] for name, rows in stacks.items()}
        parts.append(save(prefix.with_name(f"half{half}"), cut, specs))
    merged = prefix.with_name("merged")
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=str(merged))
    return merged


def test_sparse_cores_with_empty_layouts(tmp_path: Path) -> None:
    """As a layer on CPU has them; two devices' slices of it could then pass for those of two hosts."""
    values = random_values(SHAPES, "sgd")
    prefix = write(tmp_path / "ckpt", sparse_core_embedding(values, "sgd", devices=2))
    serialized = tf.train.load_checkpoint(str(prefix)).get_tensor(
        "model/emb/_sparse_core_table_layouts/.ATTRIBUTES/VARIABLE_VALUE"
    )
    with open_checkpoint(with_layouts_of(prefix, serialized)) as checkpoint:
        check(checkpoint, values)
    with refused(CheckpointFormatError):
        open_checkpoint(with_layouts_of(prefix, b""))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_saved_again_on_cpu_with_slots(tmp_path: Path, optimizer: str) -> None:
    """A layer on CPU saves the layouts that it restored, over tables that lie in order now: stale."""
    values = random_values({"t": (128, 8), "u": (20, 8)}, optimizer)
    prefix = write(tmp_path / "cores", sparse_core_embedding(values, optimizer, devices=2))
    layer = EMBEDDING.TPUEmbeddingForServing(
        features({"t": (128, 8), "u": (20, 8)}), None if optimizer == "sgd" else OPTIMIZERS[optimizer]
    )
    tf.train.Checkpoint(model=tf.train.Checkpoint(emb=layer)).restore(str(prefix))
    layer.build()
    with refused(CheckpointFormatError):
        open_checkpoint(write(tmp_path / "again", layer))
