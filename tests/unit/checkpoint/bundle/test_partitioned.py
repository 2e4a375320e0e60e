"""Partitioned variables of TensorFlow 1, and the options that say what files do not."""

import contextlib
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.bundles import recorded, save
from tests.support.checkpoint.partitioned import TABLE, partitioned
from tests.support.messages import refused
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, ConfigError, UnknownTableError
from tpuembed.export import export_saved_model


@pytest.mark.parametrize(
    ("cuts", "order"),
    [
        # Four rows, four rows, three rows: by "mod", ids 0, 3, 6 and 9 are in the first part.
        (("0,4:-", "4,4:-", "8,3:-"), [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7]),
        (("0,3:-", "3,2:-", "5,2:-", "7,2:-", "9,2:-"), [0, 3, 5, 7, 9, 1, 4, 6, 8, 10, 2]),
    ],
)
def test_rows_by_hand(tmp_path: Path, cuts: tuple[str, ...], order: list[int]) -> None:
    prefix = partitioned(tmp_path, *cuts)
    with open_checkpoint(prefix, partition_strategy="mod") as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("emb"), TABLE[order])
        np.testing.assert_array_equal(checkpoint.read("emb", 5, 9), TABLE[order[5:9]])
        assert (checkpoint.format, checkpoint.tables()["emb"].layout) == ("partitioned", f"{len(cuts)} partitions, mod")
        assert recorded(checkpoint, "emb") is None
    with open_checkpoint(prefix, partition_strategy="div") as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("emb"), TABLE)
        assert (checkpoint.format, checkpoint.tables()["emb"].layout) == ("partitioned", f"{len(cuts)} partitions, div")
        assert recorded(checkpoint, "emb") == google_crc32c.value(TABLE.tobytes())


def test_without_a_strategy(tmp_path: Path) -> None:
    with refused(CheckpointFormatError, match="variable 'emb'"):
        open_checkpoint(partitioned(tmp_path, "0,6:-", "6,5:-"))


@pytest.mark.parametrize("strategy", ["mod", "div"])
@pytest.mark.parametrize("cuts", [("0,5:-", "5,6:-"), ("0,10:-", "10,1:-"), ("0,6:0,1", "0,6:1,1", "6,5:-")])
def test_parts_that_no_partitioner_makes(tmp_path: Path, strategy: str, cuts: tuple[str, ...]) -> None:
    with refused(CheckpointFormatError, match="variable 'emb'"):
        open_checkpoint(partitioned(tmp_path, *cuts), partition_strategy=strategy)


def test_parts_of_columns_need_no_strategy(tmp_path: Path) -> None:
    with open_checkpoint(partitioned(tmp_path, "-:0,1", "-:1,1")) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("emb"), TABLE)
        assert checkpoint.format == "dense"


def test_variables_in_one_piece_need_no_strategy_and_allow_one(tmp_path: Path) -> None:
    prefix = save(tmp_path / "ckpt", {"emb": TABLE})
    for options in ({}, {"partition_strategy": "mod"}):
        with open_checkpoint(prefix, **options) as checkpoint:
            np.testing.assert_array_equal(checkpoint.read("emb"), TABLE)
            assert checkpoint.options == options


_SLOTS = {
    "Adagrad": {"accumulators": "accumulator"},
    "Adam": {"momenta": "m", "velocities": "v"},
    "Ftrl": {"accumulators": "accum", "linears": "linear"},
    "Momentum": {"momenta": "momentum"},
}
"""Our name -> the optimizer's own."""


def trained(
    folder: Path, optimizer: str, *, parts: int = 1, scope: str = "", name: str | None = None, also: str = ""
) -> dict[str, Any]:
    """Train "model/emb" with an optimizer of TensorFlow 1 and save it; what the session says the table and its slots are."""
    v1 = tf.compat.v1
    options: dict[str, Any] = {"momentum": 0.9} if optimizer == "Momentum" else {}
    with tf.Graph().as_default(), v1.Session() as session:
        partitioner = v1.fixed_size_partitioner(parts) if parts > 1 else None
        with v1.variable_scope("model"):
            emb = v1.get_variable("emb", initializer=tf.constant(TABLE), partitioner=partitioner)
        lookup = v1.nn.embedding_lookup(emb, [0, 7], partition_strategy="div")
        loss = tf.reduce_sum(tf.square(lookup) * [[1.0, 2.0], [3.0, 4.0]])
        with v1.variable_scope(scope) if scope else contextlib.nullcontext():
            rule = getattr(v1.train, f"{optimizer}Optimizer")(0.5, name=name or optimizer, **options)
            train = rule.minimize(loss)
        if also:
            v1.get_variable(also, initializer=tf.constant(TABLE))
        session.run(v1.global_variables_initializer())
        for _ in range(3):
            session.run(train)
        pieces = list(emb) if parts > 1 else [emb]
        slots = {
            ours: np.concatenate(session.run([rule.get_slot(piece, theirs) for piece in pieces]))
            for ours, theirs in _SLOTS[optimizer].items()
        }
        v1.train.Saver().save(session, str(folder / "ckpt"))
        return {"table": np.concatenate(session.run(pieces)), **slots}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("optimizer", _SLOTS)
def test_slots_of_tensorflow_1_belong_to_their_tables(tmp_path: Path, optimizer: str, parts: int) -> None:
    truth = trained(tmp_path, optimizer, parts=parts)
    with open_checkpoint(tmp_path / "ckpt", partition_strategy="div") as checkpoint:
        assert {name: set(info.slots) for name, info in checkpoint.tables().items()} == {
            "model/emb": set(_SLOTS[optimizer])
        }
        np.testing.assert_array_equal(checkpoint.read("model/emb"), truth["table"])
        for slot in _SLOTS[optimizer]:
            np.testing.assert_array_equal(checkpoint.read("model/emb", slot=slot), truth[slot])
        with refused(UnknownTableError, match="did you mean 'model/emb'"):
            checkpoint.read(f"model/emb/{optimizer}")


def test_slots_of_an_optimizer_in_a_scope_belong_to_their_tables(tmp_path: Path) -> None:
    truth = trained(tmp_path, "Adam", scope="training/run_1")
    with open_checkpoint(tmp_path / "ckpt") as checkpoint:
        assert list(checkpoint.tables()) == ["model/emb"]
        for slot in _SLOTS["Adam"]:
            np.testing.assert_array_equal(checkpoint.read("model/emb", slot=slot), truth[slot])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", _SLOTS)
def test_slots_with_holes_do_not_hide_their_table(tmp_path: Path, optimizer: str) -> None:
    """In a scope TensorFlow cuts a partitioned slot's name wrongly, and saves each part as a tensor with holes."""
    truth = trained(tmp_path, optimizer, parts=3, scope="training")
    with open_checkpoint(tmp_path / "ckpt", partition_strategy="div") as checkpoint:
        assert {name: info.slots for name, info in checkpoint.tables().items()} == {"model/emb": ()}
        np.testing.assert_array_equal(checkpoint.read("model/emb"), truth["table"])
        [key, *_] = [
            key
            for key in tf.train.load_checkpoint(str(tmp_path / "ckpt")).get_variable_to_shape_map()
            if "part_" in key
        ]
        with refused(CheckpointCorruptError):
            checkpoint.read(key)
    features = {"features": {"videos": {"table": "model/emb", "input": "id"}}}
    path = export_saved_model(
        tmp_path / "ckpt", tmp_path / "model", serving_config=features, checkpoint_options={"partition_strategy": "div"}
    ).path
    loaded = tf.saved_model.load(str(path))
    found = loaded.signatures["serving_default"](videos=tf.range(11, dtype=tf.int64))["videos"]
    np.testing.assert_array_equal(found, truth["table"])


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"name": "mine"}, {"model/emb/mine"}),  # not known
        (
            {"also": "emb"},
            {"emb", "model/emb/Adagrad"},
        ),  # a slot of "emb", made in the scope "model", has this name too
        ({"also": "model/emb/Adagrad_1"}, {"model/emb/Adagrad", "model/emb/Adagrad_1"}),  # two optimizers
        ({"also": "model2/model/emb/Adagrad"}, {"model/emb/Adagrad", "model2/model/emb/Adagrad"}),
    ],
)
def test_slots_that_nothing_proves_are_variables(tmp_path: Path, options: dict[str, Any], left: set[str]) -> None:
    trained(tmp_path, "Adagrad", **options)
    with open_checkpoint(tmp_path / "ckpt") as checkpoint:
        assert {name: info.slots for name, info in checkpoint.tables().items()} == dict.fromkeys(
            {"model/emb", *left}, ()
        )


@pytest.mark.parametrize(
    "options",
    [
        {"partition_strategy": "modulo"},
        {"partition_strategy": None},
        {"partition_stategy": "mod"},
    ],
)
def test_options_that_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with refused(ConfigError):
        open_checkpoint(save(tmp_path / "ckpt", {"emb": TABLE}), **options)


def test_a_strategy_for_a_checkpoint_that_leaves_no_room_for_it(tmp_path: Path) -> None:
    prefix = tf.train.Checkpoint(table=tf.Variable(TABLE)).write(str(tmp_path / "ckpt"))
    with refused(ConfigError, match="partition_strategy"):
        open_checkpoint(prefix, partition_strategy="mod")


@pytest.mark.parametrize("strategy", ["mod", "div"])
def test_workers_of_an_export_open_it_the_same_way(tmp_path: Path, strategy: str) -> None:
    prefix = partitioned(tmp_path, "0,4:-", "4,4:-", "8,3:-")
    config = {"features": {"x": {"table": "emb", "input": "id"}}}
    report = export_saved_model(
        prefix,
        tmp_path / "model",
        serving_config=config,
        checkpoint_options={"partition_strategy": strategy},
        workers=2,
    )
    served = tf.saved_model.load(str(report.path)).signatures["serving_default"](x=tf.range(11, dtype=tf.int64))["x"]
    order = [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7] if strategy == "mod" else list(range(11))
    np.testing.assert_array_equal(served, TABLE[order])
