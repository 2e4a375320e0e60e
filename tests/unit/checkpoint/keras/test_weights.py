"""Weight files and checkpoints of Keras 3: which tables and slots, what is refused, and in how much memory."""

import json
import shutil
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.keras_files import LAYER, write_archive, write_sparse_table, write_tables
from tests.support.messages import refused
from tpuembed.checkpoint import open_checkpoint
from tpuembed.checkpoint.tools import verify_files
from tpuembed.config import ServingConfig, feature_config_from_dict
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointNotFoundError, UnknownTableError
from tpuembed.files import remote

GOLDEN = Path(__file__).parents[3] / "golden"
TABLE = np.arange(36, dtype=np.float32).reshape(9, 4)


def refusal(path: Path) -> str:
    with refused(CheckpointFormatError) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what files do not tell


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("uncompiled", "dense/bias, dense/kernel, and nothing of model/_operations/0"),
        ("uncompiled_subclassed", "model/lookup"),
    ],
)
def test_keras_rs_in_a_checkpoint_of_an_uncompiled_model(name: str, missing: str) -> None:
    message = refusal(GOLDEN / "keras_rs_refused" / name / "ckpt")
    assert missing in message
    assert "model.save_weights('model.weights.h5')" in message
    assert "tf.train.Checkpoint(emb=layer._tpu_embedding)" in message


def test_keras_rs_layer_alone_in_a_checkpoint() -> None:
    refusal(GOLDEN / "keras_rs_refused" / "layer" / "ckpt")


def test_keras_rs_of_a_subclassed_model_in_a_checkpoint() -> None:
    message = refusal(GOLDEN / "keras_rs_refused" / "nameless" / "ckpt")
    assert "'sub/embeddings'" in message
    assert "model.save_weights('model.weights.h5')" in message


def test_keras_rs_whose_tables_are_called_by_the_layers_around_them() -> None:
    """TensorFlow's name of the one table is "item" inside scopes, its own name and path are "user", and vice versa."""
    message = refusal(GOLDEN / "keras_rs_refused" / "misleading" / "ckpt")
    assert "/towers_1/user/embeddings'" in message


def test_weights_of_keras_2() -> None:
    message = refusal(GOLDEN / "tfrs_weights" / "model.weights.h5")
    assert "tf.train.Checkpoint(model=model)" in message
    refusal(GOLDEN / "tfrs_weights" / "old.h5")


def test_weights_without_a_table(tmp_path: Path) -> None:
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]).save_weights(tmp_path / "model.weights.h5")
    assert "2 arrays" in refusal(tmp_path / "model.weights.h5")


def test_tables_on_sparse_cores(tmp_path: Path) -> None:
    """keras-rs then stores one number of its own, and nothing of its tables."""
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        group = file.create_group(f"{LAYER}/vars")
        group.attrs["name"] = "de"
        group["0"] = np.zeros(1, np.float32)
    message = refusal(tmp_path / "model.weights.h5")
    assert "layer 'de'" in message
    assert "tf.train.Checkpoint(emb=layer._tpu_embedding)" in message


# ---- Keras 3 models in tf.train.Checkpoint


def test_embedding_of_keras_itself(tmp_path: Path) -> None:
    """By object path, as every plain variable; slots are slots, and no tables."""
    ids = keras.Input((), dtype="int32")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Embedding(9, 4)(ids)))
    model.compile("adam", "mse")
    model.fit(np.array([1, 2]), np.array([0.0, 1.0]), verbose=0)
    prefix = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    with open_checkpoint(prefix) as checkpoint:
        tables = checkpoint.tables()
        assert set(tables) == {"model/_operations/1/_embeddings", "model/_operations/2/_kernel"}
        assert tables["model/_operations/1/_embeddings"].slots == ("momenta", "velocities")
        optimizer = {variable.name: variable.numpy() for variable in model.optimizer.variables}
        for slot, theirs in {"momenta": "momentum", "velocities": "velocity"}.items():
            (name,) = (name for name in optimizer if name.endswith(f"embeddings_{theirs}"))
            np.testing.assert_array_equal(
                checkpoint.read("model/_operations/1/_embeddings", slot=slot), optimizer[name]
            )


def test_a_table_of_keras_rs_beside_an_embedding_of_keras(tmp_path: Path) -> None:
    """The graph shows an object without anything, as of a Dropout."""
    ids = keras.Input((), dtype="int32")
    model = keras.Model(ids, keras.layers.Dropout(0.5)(keras.layers.Embedding(9, 4)(ids)))
    with open_checkpoint(tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))) as checkpoint:
        assert set(checkpoint.tables()) == {"model/_operations/1/_embeddings"}
        with refused(UnknownTableError, match="table 'user'"):
            checkpoint.read("user")


class OnSparseCores(keras.layers.Layer):
    """The variable that keras-rs' layer has where its tables lie on SparseCores."""

    def build(self, _: Any) -> None:
        self._gradient_trap_dummy = self.add_weight(name="_gradient_trap_dummy", shape=(1,))

    def call(self, ids: Any) -> Any:
        return keras.ops.cast(ids, "float32") * self._gradient_trap_dummy


def test_tables_on_sparse_cores_in_a_checkpoint(tmp_path: Path) -> None:
    ids = keras.Input((1,), dtype="int32")
    rows = [keras.layers.Flatten()(keras.layers.Embedding(9, 4)(ids)), OnSparseCores(name="de")(ids)]
    model = keras.Model(ids, keras.layers.Concatenate()(rows))
    message = refusal(Path(tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))))
    assert "keras_rs.layers.DistributedEmbedding de " in message
    assert "tf.train.Checkpoint(emb=layer._tpu_embedding)" in message


# ---- what a .keras file tells


def test_layer_config_of_a_keras_file() -> None:
    """Enough to export without a serving_config."""
    with open_checkpoint(GOLDEN / "keras_rs" / "keras_adam" / "model.keras") as checkpoint:
        config = checkpoint.layer_config
    assert config is not None
    assert {name: (t["vocabulary_size"], t["dim"], t["combiner"]) for name, t in config["tables"].items()} == {
        "video.v1": (11, 4, "mean"),
        "user": (7, 3, "sqrtn"),
        "item": (7, 3, "sum"),
        "tag": (5, 2, "sum"),
    }
    features = ServingConfig.from_features(feature_config_from_dict(config)).features
    assert {name: feature.table for name, feature in features.items()} == {
        "watched": "video.v1",
        "fav": "video.v1",
        "who/user": "user",
        "who/what/item": "item",
        "who/what/tag": "tag",
    }


def test_layer_config_of_weights_alone() -> None:
    with open_checkpoint(GOLDEN / "keras_rs" / "weights_h5") as checkpoint:
        assert checkpoint.layer_config is None


def distributed_embedding(**fields: Any) -> dict[str, Any]:
    return {"class_name": "DistributedEmbedding", "config": {"name": "de", **fields}}


def archive_with(tmp_path: Path, *tables: Any, features: Any = None, name: Any = "de") -> Path:
    """A `.keras` file with tables user and item, and a config of them."""
    weights = write_tables(tmp_path / "m.weights.h5", {"user": TABLE, "item": TABLE[:5]})
    features = features or {"x": {"name": "x", "table": 0}}
    layer = distributed_embedding(name=name, tables=list(tables), feature_configs=features)
    return write_archive(tmp_path / "m.keras", weights, {"layers": [layer]})


USER = {"name": "user", "vocabulary_size": 9, "embedding_dim": 4, "combiner": "sum"}
ITEM = {"name": "item", "vocabulary_size": 5, "embedding_dim": 4, "combiner": "sum"}


@pytest.mark.parametrize(
    ("features", "found"),
    [
        # As Keras' serialization writes tuples and lists.
        (
            {"class_name": "__tuple__", "items": [{"name": "x", "table": 1}, [{"deep": {"name": "y", "table": 0}}]]},
            [{"table": "item"}, [{"deep": {"table": "user"}}]],
        ),
        (3, None),
        ({"x": {"name": "x", "table": 7}}, None),
        ({"x": {"name": "x", "table": -1}}, None),
        ({"x": None}, None),
        ([[]] * 2 + [1], None),
    ],
)
def test_features_in_a_config(tmp_path: Path, features: Any, found: Any) -> None:
    with open_checkpoint(archive_with(tmp_path, USER, ITEM, features=features)) as checkpoint:
        assert set(checkpoint.tables()) == {"user", "item"}
        assert (checkpoint.layer_config or {}).get("features") == found


@pytest.mark.parametrize("tables", [[3], [{"name": "a"}], [USER, ITEM]])
def test_layers_that_are_none(tmp_path: Path, tables: list[Any]) -> None:
    with open_checkpoint(archive_with(tmp_path, *tables, name=3)) as checkpoint:
        assert checkpoint.layer_config is None


def test_tables_that_are_not_in_the_weights(tmp_path: Path) -> None:
    """Those that keras-rs placed on SparseCores, beside others that it did not."""
    message = refusal(archive_with(tmp_path, USER, ITEM, USER | {"name": "big"}, USER | {"name": "huge"}))
    assert "layer 'de' has tables 'big', 'huge'" in message


def test_config_and_weights_disagree(tmp_path: Path) -> None:
    for tables in ([USER | {"vocabulary_size": 10}, ITEM], [USER | {"embedding_dim": 3}, ITEM], [USER]):
        with refused(CheckpointCorruptError, match="layer 'de'"):
            open_checkpoint(archive_with(tmp_path, *tables))


def test_config_and_weights_in_different_order(tmp_path: Path) -> None:
    """keras-rs numbers tables as its config does, and so do optimizers: names that were swapped show."""
    with refused(CheckpointCorruptError, match="layer 'de'"):
        open_checkpoint(archive_with(tmp_path, ITEM, USER))


# ---- slots by number


def golden_with(tmp_path: Path, config: Callable[[Any], object], arrays: Callable[[Any], object]) -> Path:
    """The golden `keras_adam` with its compile config and its optimizer's arrays changed."""
    with zipfile.ZipFile(GOLDEN / "keras_rs" / "keras_adam" / "model.keras") as source:
        text = json.loads(source.read("config.json"))
        (tmp_path / "m.weights.h5").write_bytes(source.read("model.weights.h5"))
    config(text["compile_config"])
    with h5py.File(tmp_path / "m.weights.h5", "a") as file:
        arrays(file["optimizer/vars"])
    return write_archive(tmp_path / "m.keras", tmp_path / "m.weights.h5", text)


def nothing(_: Any) -> None:
    """No change."""


def slots(path: Path) -> dict[str, tuple[str, ...]]:
    with open_checkpoint(path) as checkpoint:
        return {name: info.slots for name, info in checkpoint.tables().items()}


def set_field(name: str, value: Any) -> Callable[[Any], object]:
    return lambda compiled: compiled["optimizer"]["config"].__setitem__(name, value)


@pytest.mark.parametrize(
    "config",
    [
        set_field("amsgrad", True),
        set_field("use_ema", True),
        set_field("gradient_accumulation_steps", 2),
        set_field("learning_rate", {"class_name": "ExponentialDecay"}),
        lambda compiled: compiled["optimizer"].__setitem__("class_name", "Adagrad2"),
        lambda compiled: compiled["optimizer"].__setitem__("module", "mine"),
        lambda compiled: compiled.__setitem__("optimizer", "adam"),
        lambda compiled: compiled["optimizer"].pop("config"),
        lambda compiled: compiled["optimizer"].__setitem__("class_name", "SGD"),
        lambda compiled: compiled["optimizer"].__setitem__("class_name", "Adagrad"),
    ],
)
def test_slots_of_an_optimizer_that_is_not_known_are_left_out(config: Callable[[Any], object], tmp_path: Path) -> None:
    path = golden_with(tmp_path, config, nothing)
    assert slots(path) == dict.fromkeys(["item", "tag", "user", "video.v1"], ())


def grow(group: Any) -> None:
    rows = group["2"][:]
    del group["2"]
    group["2"] = np.vstack([rows, rows])


@pytest.mark.parametrize(
    "arrays",
    [
        lambda group: group.__delitem__("5"),
        lambda group: group.__setitem__("99", 1.0),
        lambda group: group.__setitem__("more", 1.0),
        lambda group: group.move("2", "two"),
        grow,
    ],
)
def test_slots_that_do_not_add_up_are_left_out(arrays: Callable[[Any], object], tmp_path: Path) -> None:
    path = golden_with(tmp_path, nothing, arrays)
    assert not any(slots(path).values())


def test_slots_that_could_be_another_variable_s(tmp_path: Path) -> None:
    """A table that was not trained beside a kernel of its shape that was: one variable of the shape has slots."""
    with zipfile.ZipFile(GOLDEN / "keras_rs" / "keras_unsure" / "model.keras") as source:
        config = json.loads(source.read("config.json"))
        (tmp_path / "m.weights.h5").write_bytes(source.read("model.weights.h5"))
    with h5py.File(tmp_path / "m.weights.h5", "a") as file:
        group = file["optimizer/vars"]
        shapes = [group[str(number)].shape for number in range(len(group))]
        assert shapes == [(), (), (12, 1), (4, 11), (12, 1), (1,)]
        del group["2"]
        for number in (3, 4, 5):
            group.move(str(number), str(number - 1))
    path = write_archive(tmp_path / "m.keras", tmp_path / "m.weights.h5", config)
    assert slots(path) == {"alike": (), "other": ("accumulators",)}


def test_slots_that_add_up(tmp_path: Path) -> None:
    """What the cases above spoil."""
    assert all(found == ("momenta", "velocities") for found in slots(golden_with(tmp_path, nothing, nothing)).values())


# ---- where it is


def test_a_folder_is_read_if_it_holds_one_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        open_checkpoint(tmp_path)
    write_tables(tmp_path / "a.weights.h5", {"user": TABLE})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path == str(tmp_path / "a.weights.h5")
    write_tables(tmp_path / "b.weights.h5", {"user": TABLE})
    assert "contains several weight files (a.weights.h5, b.weights.h5). Give the path of one" in refusal(tmp_path)


def test_file_of_any_name(tmp_path: Path) -> None:
    write_tables(tmp_path / "weights", {"user": TABLE})
    with open_checkpoint(tmp_path / "weights") as checkpoint:
        assert checkpoint.format == "keras"


def test_numbered_file_that_is_no_shard(tmp_path: Path) -> None:
    with open_checkpoint(write_tables(tmp_path / "epoch_00010.weights.h5", {"user": TABLE})) as checkpoint:
        assert list(checkpoint.tables()) == ["user"]


def test_fingerprint(tmp_path: Path) -> None:
    """Of the rows of another training at the same places, it changes with the time; of one file, it stays."""

    def fingerprint() -> str:
        with open_checkpoint(tmp_path / "m.weights.h5") as checkpoint:
            return checkpoint.fingerprint()

    write_tables(tmp_path / "m.weights.h5", {"user": TABLE})
    first = fingerprint()
    assert fingerprint() == first
    time.sleep(0.02)
    write_tables(tmp_path / "m.weights.h5", {"user": TABLE + 1})
    assert fingerprint() != first


def test_fingerprint_of_shards(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "keras_rs" / "sharded", tmp_path / "s")
    with open_checkpoint(tmp_path / "s" / "model.weights.json") as checkpoint:
        first = checkpoint.fingerprint()
        (tmp_path / "s" / "model_00003.weights.h5").touch()
        assert checkpoint.fingerprint() != first


def test_a_tables_layout_names_its_file() -> None:
    with open_checkpoint(GOLDEN / "keras_rs" / "sharded" / "model.weights.json") as checkpoint:
        assert checkpoint.tables()["video.v1"].layout == "in model_00000.weights.h5"


@pytest.mark.parametrize("name", ["keras_adam/model.keras", "sharded/model.weights.json", "keras_folder/model"])
def test_a_store_reads_as_a_disk_does(name: str) -> None:
    """The same as on a disk."""
    local = GOLDEN / "keras_rs" / name
    store: Any = remote._store("memory", "weights")
    for path in (GOLDEN / "keras_rs").rglob("*"):
        if path.is_file():
            store.put(str(path.relative_to(GOLDEN / "keras_rs")), path.read_bytes())
    with open_checkpoint(local) as there, open_checkpoint(f"memory://weights/{name}") as here:
        assert here.tables() == there.tables()
        for table, info in there.tables().items():
            for slot in (None, *info.slots):
                np.testing.assert_array_equal(here.read(table, slot=slot), there.read(table, slot=slot))
        assert here.path.startswith("memory://weights/")


# ---- how it is read


def test_many_threads_and_strided_targets(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(5000, 7)).astype(np.float32)
    path = write_tables(tmp_path / "m.weights.h5", {"a": rows, "b": -rows})
    wrong: list[Any] = []
    with open_checkpoint(path) as checkpoint:

        def work(seed: int) -> None:
            for start in np.random.default_rng(seed).integers(0, 4000, 40):
                out = np.zeros((700, 2, 7), np.float32)
                checkpoint.read_into("b", int(start), out[:, 1])
                if not (out[:, 1] == -rows[start : start + 700]).all() or out[:, 0].any():
                    wrong.append(start)
                if not (checkpoint.read("a", int(start), int(start) + 9) == rows[start : start + 9]).all():
                    wrong.append(start)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_two_terabytes_of_nothing(tmp_path: Path) -> None:
    """A sparse file whose table has 2^33 rows: opened and read beyond row 2^32 in under a second."""
    rows, last = 2**33, np.arange(64, dtype=np.float32)
    path = write_sparse_table(tmp_path / "m.weights.h5", "user", rows, last)
    started = time.monotonic()
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tables()["user"].rows == rows
        np.testing.assert_array_equal(checkpoint.read("user", rows - 2, rows), [last * 0, last])
        assert not checkpoint.read("user", 2**32 + 5, 2**32 + 9).any()
    assert time.monotonic() - started < 30, "no more than what is there is read"


# ---- verify


@pytest.mark.nightly
def test_every_flipped_bit_of_an_archived_row_is_found(tmp_path: Path) -> None:
    keras = write_archive(tmp_path / "m.keras", write_tables(tmp_path / "m.weights.h5", {"user": TABLE}))
    assert verify_files(keras).damaged == ()
    assert verify_files(keras).unchecked == ()
    whole = keras.read_bytes()
    start = whole.index(TABLE.tobytes())
    for position in range(start, start + TABLE.nbytes, 11):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        keras.write_bytes(damaged)
        (found,) = verify_files(keras).damaged
        assert found.name == "model.weights.h5"
        assert "Bad CRC-32 for file 'model.weights.h5'" in found.reason
