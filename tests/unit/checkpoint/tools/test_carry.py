"""`carry_checkpoint`, against dictionaries of rows by name, and restored by TensorFlow."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from tests.support.checkpoint.bundles import write
from tests.support.checkpoint.named import named_layer, write_named, write_named_weights
from tests.support.layer.restored import Array, Tables
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, Vocabulary, carry_checkpoint
from tpuembed.checkpoint import open_checkpoint
from tpuembed.checkpoint.tools import carry, verify_files
from tpuembed.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    ConfigError,
    TpuEmbedError,
    UnknownTableError,
)
from tpuembed.tensor_bundle import Bundle, shard_path
from tpuembed_cli.main import cli

SLOTS = {(): 0.0, ("accumulators",): 0.1, ("momenta", "velocities"): 0.0}


def _rows(rows: int, dim: int, *slots: str) -> dict[str | None, Array]:
    rng = np.random.default_rng([rows, dim])
    return {slot: rng.normal(size=(rows, dim)).astype(np.float32) for slot in (None, *slots)}


def _write(folder: Path, tables: Tables, vocabularies: Any, **options: Any) -> str:
    beside = {"dense": tf.Variable([[1.0, 2.0]]), "text": tf.Variable("words"), "step": tf.Variable(5, dtype=tf.int64)}
    return write_named(folder / "ckpt", named_layer(tables, **options), vocabularies, **beside)


def _tensors(prefix: str) -> dict[str, Any]:
    """All tensors, as TensorFlow reads them."""
    reader = tf.train.load_checkpoint(prefix)
    return {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()}


@pytest.mark.parametrize("slots", SLOTS, ids="-".join)
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_of_a_dictionary(
    tmp_path: Path, seed: int, slots: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng([seed, len(slots)])
    monkeypatch.setattr(carry, "_PIECE_BYTES", int(rng.integers(1, 300)))
    everything = [b"", b"\xff", *(f"name {number}".encode() for number in range(50))]
    old, new = ([everything[i] for i in rng.permutation(len(everything))[: rng.integers(1, 52)]] for _ in range(2))
    buckets = int(rng.integers(0, 3)), int(rng.integers(0, 3))
    truth = _rows(buckets[0] + len(old) + int(rng.integers(0, 9)), 3, *slots)
    path = _write(
        tmp_path,
        {"films": truth, "other": _rows(4, 2)},
        {"films": Vocabulary(old, oov_buckets=buckets[0]), "other": Vocabulary(["x"])},
    )
    wanted = Vocabulary(new, oov_buckets=buckets[1])
    report = carry_checkpoint(
        path, wanted, tmp_path / "out" / "new", table="films", initializer=lambda shape: np.full(shape, 5.0)
    )
    rows = max(len(truth[None]), wanted.rows)
    assert report.rows == (len(truth[None]), rows)
    assert (report.names.kept, report.names.new) == (len({*old} & {*new}), len({*new} - {*old}))
    assert verify_files(report.path).damaged == ()
    assert verify_files(report.path).unchecked == ()
    with open_checkpoint(report.path) as checkpoint:
        for slot in (None, *slots):
            expected = np.full((rows, 3), 5.0 if slot is None else SLOTS[slots], np.float32)
            known = {name: truth[slot][number] for number, name in enumerate(old, buckets[0])}
            for number, name in enumerate(new, buckets[1]):
                expected[number] = known.get(name, expected[number])
            if buckets[0] == buckets[1]:
                expected[: buckets[0]] = truth[slot][: buckets[0]]
            np.testing.assert_array_equal(checkpoint.read("films", slot=slot), expected)
        found = checkpoint.vocabulary("films")
        assert found is not None
        assert found.names(range(found.rows)) == wanted.names(range(wanted.rows))
        assert checkpoint.update_counts() == {"films": 7, "other": 7}
    before, after = _tensors(path), _tensors(report.path)
    assert before.keys() == after.keys()
    for key in before:
        if "/films" not in key and "tpuembed_config" not in key:
            np.testing.assert_array_equal(before[key], after[key], err_msg=key)


def test_a_layer_of_the_new_size_restores_it(tmp_path: Path) -> None:
    truth = _rows(3, 2, "accumulators")
    path = _write(tmp_path, {"films": truth}, {"films": Vocabulary(["a", "b", "c"])})
    carry_checkpoint(path, Vocabulary(["d", "c", "b", "a", "e"]), tmp_path / "new", initializer="zeros")
    layer = named_layer({"films": _rows(5, 2, "accumulators")}, count=0)
    dense = tf.Variable([[0.0, 0.0]])
    status = tf.train.Checkpoint(layer=tf.train.Checkpoint(_tpu_embedding=layer._tpu_embedding), dense=dense).read(
        str(tmp_path / "new")
    )
    status.assert_existing_objects_matched()
    state = layer._parts.backend.states["films"]
    none = np.zeros((1, 2), np.float32)
    for slot, empty in ((None, none), ("accumulators", none + np.float32(0.1))):
        variable = state.variable if slot is None else state.slots[slot]
        np.testing.assert_array_equal(variable.numpy(), np.concatenate([empty, truth[slot][::-1], empty]))
    np.testing.assert_array_equal(dense.numpy(), [[1.0, 2.0]])
    with pytest.warns(UserWarning, match="'films' has names, and table 'films' of layer .* takes row numbers"):
        layer.restore_tables(tmp_path / "new")


def test_the_default_initializer_is_that_of_tables(tmp_path: Path) -> None:
    path = _write(tmp_path, {"films": _rows(1, 64)}, {"films": Vocabulary(["a"])})
    carry_checkpoint(path, Vocabulary(["a", *(f"n{number}" for number in range(2000))]), tmp_path / "new")
    with open_checkpoint(tmp_path / "new") as checkpoint:
        rows = checkpoint.read("films", 1) * 8
    assert abs(rows.mean()) < 0.01
    assert abs(rows.std() - 0.8796) < 0.01  # of a normal distribution cut at two standard deviations
    assert np.abs(rows).max() <= 2
    assert len(np.unique(rows[:, 0])) > 1900


def test_tracked_rows_begin_a_new_history(tmp_path: Path) -> None:
    path = _write(tmp_path, {"films": _rows(3, 2)}, {"films": Vocabulary(["a", "b"])}, track_rows=True)
    carry_checkpoint(path, Vocabulary(["b", "a", "c", "d"]), tmp_path / "new")
    with open_checkpoint(path) as before, open_checkpoint(tmp_path / "new") as after:
        old, new = before.row_history("films"), after.row_history("films")
        assert old is not None
        assert new is not None
        assert not new.since(old)
        assert new.updates == old.updates == 7
        stamps = np.ones(4, np.int32)
        after.read_stamps("films", 0, stamps)
        assert not stamps.any()


def test_vocabularies_in_files(tmp_path: Path) -> None:
    path = _write(tmp_path, {"films": _rows(4, 2)}, {"films": Vocabulary(["a", "b"], oov_buckets=1)})
    (tmp_path / "names.txt").write_text("b\nc\n")
    (tmp_path / "saved").write_bytes(Vocabulary(["b", "c"], oov_buckets=2).to_bytes())
    for name, buckets in (("names.txt", 1), ("saved", 2)):
        report = carry_checkpoint(path, tmp_path / name, tmp_path / f"{name}.ckpt")
        assert (report.names.new_names, report.names.dropped_names) == ((b"c",), (b"a",))
        assert report.names.buckets == (1, buckets)


def test_a_text_file_keeps_what_was_counted(tmp_path: Path) -> None:
    old = Vocabulary(["a", "b"], grows=True, min_count=2)
    old.grow(["b"] * 5, room=9, update=7)
    path = _write(tmp_path, {"films": _rows(4, 2)}, {"films": old})
    (tmp_path / "names.txt").write_text("c\nb\n")
    carry_checkpoint(path, tmp_path / "names.txt", tmp_path / "carried")
    with open_checkpoint(tmp_path / "carried") as carried:
        new = carried.vocabulary("films")
    assert new is not None
    assert (new.grows, new.min_count) == (True, 2)
    assert dict(zip(new.names([0, 1]), new.counts.tolist(), strict=True)) == {b"c": 0, b"b": 5}
    assert new.evict(not_seen_for=1).tolist() == []


def test_the_command(tmp_path: Path) -> None:
    path = _write(tmp_path, {"films": _rows(3, 2)}, {"films": Vocabulary(["a", b"\x1b[31m", "b"])})
    (tmp_path / "names.txt").write_text("b\n" + "".join(f"new {number}\n" for number in range(7)))
    said = CliRunner().invoke(
        cli, ["carry", path, str(tmp_path / "names.txt"), str(tmp_path / "new"), "--initializer", "ones"]
    )
    assert said.exit_code == 0, said.output
    assert said.output.splitlines() == [
        f"{tmp_path / 'new'}: table films: 1 names kept, 7 new, 2 dropped; 3 rows, now 8",
        "new: 'new 0', 'new 1', 'new 2', 'new 3', 'new 4' and 2 more",
        "dropped: 'a', '\\x1b[31m'",
    ]
    said = CliRunner().invoke(cli, ["carry", path, str(tmp_path / "names.txt"), str(tmp_path / "json"), "--json"])
    assert json.loads(said.output) == {
        "path": str(tmp_path / "json"), "table": "films", "rows": [3, 8], "kept": 1, "new": 7, "dropped": 2,
        "new_names": [f"new {number}" for number in range(5)], "dropped_names": ["a", "\x1b[31m"], "buckets": [0, 0],
    }  # fmt: skip


def _refusals() -> dict[str, tuple[type[TpuEmbedError], Callable[[Path], Any]]]:
    rows, names = {"films": _rows(3, 2, "accumulators")}, {"films": Vocabulary(["a", "b"])}

    def act(folder: Path, new: Any = None, tables: Any = rows, vocabularies: Any = names, **options: Any) -> Any:
        path = _write(folder, tables, vocabularies)
        return carry_checkpoint(path, Vocabulary(["b"]) if new is None else new, folder / "new", **options)

    def weights(folder: Path) -> Any:
        path = write_named_weights(folder / "model.weights.h5", named_layer(rows), names)
        return carry_checkpoint(path, Vocabulary(["b"]), folder / "new")

    def taken(folder: Path) -> Any:
        write(folder / "new", {"t": np.ones((1, 1), np.float32)})
        return act(folder)

    def lone_data(folder: Path) -> Any:
        shard_path(folder / "new", 0, 1).touch()
        return act(folder)

    def no_optimizer(folder: Path) -> Any:
        layer = TPUEmbedding(FeatureConfig(TableConfig(3, 2, "films")), optimizer=None)
        slot = tf.Variable(np.zeros((3, 2), np.float32))
        return carry_checkpoint(
            write_named(folder / "ckpt", layer, names, momentum=slot), Vocabulary(["b"]), folder / "new"
        )

    two = {"films": _rows(3, 2), "books": _rows(3, 2)}
    return {
        "weights": (CheckpointFormatError, weights),
        "taken": (ConfigError, taken),
        "lone-data": (ConfigError, lone_data),
        "slots-of-a-model": (CheckpointFormatError, no_optimizer),
        "no-vocabulary": (ConfigError, lambda folder: act(folder, vocabularies={})),
        "no-vocabulary-of-that-table": (ConfigError, lambda folder: act(folder, tables=two, table="books")),
        "two": (ConfigError, lambda folder: act(folder, tables=two, vocabularies=dict.fromkeys(two, names["films"]))),
        "unknown": (UnknownTableError, lambda folder: act(folder, table="film")),
        "dtype": (ConfigError, lambda folder: act(folder, Vocabulary([1], dtype="int64"))),
        "missing": (ConfigError, lambda folder: act(folder, folder / "none")),
        "damaged": (
            CheckpointCorruptError,
            lambda folder: (folder / "v").write_bytes(Vocabulary(["b"]).to_bytes()[:-1]) and act(folder, folder / "v"),
        ),
        "initializer": (ConfigError, lambda folder: act(folder, initializer="glorot")),
        "shape": (
            ConfigError,
            lambda folder: act(folder, Vocabulary(["n"]), initializer=lambda shape: np.zeros(shape[1:])),
        ),
    }


@pytest.mark.parametrize("why", _refusals())
def test_refusals_leave_nothing(tmp_path: Path, why: str) -> None:
    kind, act = _refusals()[why]
    with refused(kind):
        act(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("new"))
    assert left == {"taken": ["new.data-00000-of-00001", "new.index"], "lone-data": ["new.data-00000-of-00001"]}.get(
        why, []
    )


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = _write(tmp_path, {"films": _rows(3, 2)}, {"films": Vocabulary(["a", "b"])})
    monkeypatch.setattr(os, "posix_fallocate", full)
    with refused(CheckpointError, match="new"):
        carry_checkpoint(path, Vocabulary(["b"]), tmp_path / "new")
    assert not [name for name in tmp_path.iterdir() if name.name.startswith("new")]


def test_the_config_of_features_has_the_new_buckets(tmp_path: Path) -> None:
    old = Vocabulary(["a"], oov_buckets=1)
    tables = [TableConfig(3, 2, name) for name in ("films", "books")]
    layer = TPUEmbedding(
        {"x": [FeatureConfig(tables[0], vocabulary=old)], "y": FeatureConfig(tables[1], vocabulary=old)}, "sgd"
    )
    path = write_named(tmp_path / "ckpt", layer, {"films": old, "books": old})
    carry_checkpoint(path, Vocabulary(["a"], oov_buckets=4), tmp_path / "new", table="films", initializer="zeros")
    with open_checkpoint(tmp_path / "new") as checkpoint:
        config = checkpoint.layer_config
    assert config is not None
    assert config["features"]["x"][0]["vocabulary"]["oov_buckets"] == 4
    assert config["features"]["y"]["vocabulary"]["oov_buckets"] == 1
    assert config["tables"]["films"]["vocabulary_size"] == 5
    assert config["tables"]["books"]["vocabulary_size"] == 3


@pytest.mark.parametrize("what", ["/films/.ATTR", "films.Saccumulators", "dense", "text", "_config", "_vocabularies"])
def test_damaged_bytes_are_noticed(tmp_path: Path, what: str) -> None:
    path = _write(tmp_path, {"films": _rows(3, 2, "accumulators")}, {"films": Vocabulary(["a", "b", "c"])})
    with Bundle.open(path) as bundle:
        entries = [entry for key, entry in bundle.entries.items() if what in key]
        data = bundle.data_path(entries[0].shard)
    assert isinstance(data, Path)
    content = bytearray(data.read_bytes())
    content[entries[0].offset + entries[0].size - 1] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointCorruptError):
        carry_checkpoint(path, Vocabulary(["c", "b", "a"]), tmp_path / "new")
    assert not [name for name in tmp_path.iterdir() if name.name.startswith("new")]
