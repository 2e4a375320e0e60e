"""`restore_tables(by="name")`, against dictionaries of rows by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.named import named_layer, write_named, write_named_weights
from tests.support.layer.restored import TRAINED_BY, Array, assert_held, held, updates
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, Vocabulary
from tpuembed.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from tpuembed.manifest.row_history import UNKNOWN

HOSTILE: list[Any] = [b"", "ö", b"\xff\xfe", "line\nend", "\x1b[31m", "a/b", "a" * 3000, "\0", "[UNK]", "ö ", " ö"]


def _rows(rows: int, dim: int, *slots: str, seed: int = 0) -> dict[str | None, Array]:
    rng = np.random.default_rng([rows, dim, seed])
    return {slot: rng.normal(size=(rows, dim)).astype(np.float32) for slot in (None, *slots)}


def _layer(vocabulary: Any, rows: int, dim: int = 3, *slots: str, **options: Any) -> TPUEmbedding:
    """A layer that looks names up. Its tables hold other numbers than a new layer's."""
    optimizer = TRAINED_BY[frozenset(slots)]
    config = FeatureConfig(TableConfig(rows, dim, "films", optimizer=optimizer), vocabulary=vocabulary)
    layer = TPUEmbedding({"f": config}, **options)
    variables = layer.named_variables()
    for slot, values in _rows(rows, dim, *slots, seed=9).items():
        variables["films" if slot is None else f"films/{slot}"].assign(values)
    return layer


def _write(
    path: Path, names: list[Any], tables: Any, oov_buckets: int = 0, dtype: Any = "string", **options: Any
) -> str:
    vocabulary = Vocabulary(names, oov_buckets=oov_buckets, dtype=dtype)
    return write_named(path / "ckpt", named_layer({"films": tables}, **options), {"films": vocabulary})


@pytest.mark.parametrize("slots", [(), ("accumulators",), ("momenta", "velocities")], ids="-".join)
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_of_a_dictionary(
    tmp_path: Path, seed: int, slots: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Growth, shrinking and new orders, of names and of tables that are larger than their names need."""
    rng = np.random.default_rng([seed, len(slots)])
    monkeypatch.setattr("tpuembed.backends.table_rows.PIECE_BYTES", int(rng.integers(12, 400)))
    dtype = rng.choice(["string", "int64"])
    everything: list[Any] = (
        [*HOSTILE, *(f"name {number}" for number in range(60))]
        if dtype == "string"
        else [int(number) for number in rng.choice(np.arange(-(10**6), 10**6), 70, replace=False)]
    )
    old, new = ([everything[i] for i in rng.permutation(len(everything))[: rng.integers(1, 60)]] for _ in range(2))
    buckets = [int(rng.integers(0, 3)), int(rng.integers(0, 3))]
    truth = _rows(buckets[0] + len(old) + int(rng.integers(0, 9)), 3, *slots)
    path = _write(tmp_path, old, truth, buckets[0], dtype)
    vocabulary = Vocabulary(new, oov_buckets=buckets[1], dtype=dtype)
    layer = _layer(vocabulary, vocabulary.rows + int(rng.integers(0, 9)), 3, *slots)
    expected = {slot: rows.copy() for slot, rows in held(layer)["films"].items()}
    report = layer.restore_tables(path, by="name", resize=True)
    for slot, rows in expected.items():
        known = {name: truth[slot][number] for number, name in enumerate(old, buckets[0])}
        for number, name in enumerate(new, buckets[1]):
            rows[number] = known.get(name, rows[number])
        if buckets[0] == buckets[1]:
            rows[: buckets[0]] = truth[slot][: buckets[0]]
    assert_held(layer, {"films": expected})
    assert report.updates == updates(layer) == 7
    as_saved = [name.encode() if isinstance(name, str) else name for name in new]
    old = [name.encode() if isinstance(name, str) else name for name in old]
    added, dropped = [name for name in as_saved if name not in old], [name for name in old if name not in as_saved]
    names = report.tables[0].names
    assert names is not None
    assert (names.kept, names.new, names.dropped) == (len(set(old) & set(as_saved)), len(added), len(dropped))
    assert (names.new_names, names.dropped_names) == (tuple(added[:5]), tuple(dropped[:5]))
    assert names.buckets == (buckets[0], buckets[1])


def test_without_slots_slots_and_count_stay(tmp_path: Path) -> None:
    truth = _rows(2, 3, "accumulators")
    layer = _layer(["b", "a"], 2, 3, "accumulators")
    before = held(layer)["films"]
    path = _write(tmp_path, ["a", "b"], truth)
    assert layer.restore_tables(path, slots=False, by="name").updates is None
    assert_held(layer, {"films": {None: truth[None][::-1], "accumulators": before["accumulators"]}})


def test_weight_files(tmp_path: Path) -> None:
    truth = _rows(3, 3, "accumulators")
    path = tmp_path / "model.weights.h5"
    write_named_weights(path, named_layer({"films": truth}), {"films": Vocabulary(["a", "b", "c"])})
    layer = _layer(["c", "a", "b"], 3, 3, "accumulators")
    layer.restore_tables(path, by="name")
    assert_held(layer, {"films": {slot: rows[[2, 0, 1]] for slot, rows in truth.items()}})


def test_tables_without_names_are_restored_by_number(tmp_path: Path) -> None:
    tables = {"films": _rows(2, 3), "plain": _rows(4, 2)}
    path = write_named(tmp_path / "ckpt", named_layer(tables), {"films": Vocabulary(["a", "b"])})
    layer = TPUEmbedding(
        {
            "f": FeatureConfig(TableConfig(2, 3, "films"), vocabulary=Vocabulary(["b", "a"])),
            "p": FeatureConfig(TableConfig(4, 2, "plain")),
        },
        "sgd",
    )
    report = layer.restore_tables(path, by="name")
    assert_held(layer, {"films": {None: tables["films"][None][::-1]}, "plain": tables["plain"]})
    assert [plan.names is None for plan in report.tables] == [False, True]
    other = TPUEmbedding({"f": FeatureConfig(TableConfig(2, 3, "x"), vocabulary=Vocabulary(["b", "a"]))}, "sgd")
    other.restore_tables(path, {"x": "films"}, by="name")
    assert_held(other, {"x": {None: tables["films"][None][::-1]}})


def _named(path: Path) -> str:
    return _write(path, ["a"], _rows(2, 3))


def _without_names(path: Path) -> str:
    return write_named(path / "ckpt", named_layer({"films": _rows(2, 3)}), {})


def _named_and_plain(path: Path) -> str:
    layer = named_layer({"films": _rows(2, 3), "plain": _rows(2, 3)})
    return write_named(path / "ckpt", layer, {"films": Vocabulary(["a", "b"])})


def _damaged(path: Path) -> str:
    layer = named_layer({"films": _rows(2, 3)})
    return write_named(path / "ckpt", layer, {"films": Vocabulary(["a"]).to_bytes()[:-1]})


def _numbered() -> TPUEmbedding:
    return TPUEmbedding(FeatureConfig(TableConfig(2, 3, "films", optimizer="sgd")))


def _two() -> TPUEmbedding:
    films = FeatureConfig(TableConfig(2, 3, "films"), vocabulary=Vocabulary(["a", "b"]))
    return TPUEmbedding({"f": films, "p": FeatureConfig(TableConfig(5, 3, "plain"))}, "sgd")


_MISMATCH, _BY_NAME, _RESIZED = CheckpointMismatchError, {"by": "name"}, {"by": "name", "resize": True}


@pytest.mark.parametrize(
    ("kind", "make", "write", "options"),
    [
        pytest.param(ConfigError, lambda: _layer(["a"], 2), _named, {"by": "names"}, id="by"),
        pytest.param(
            ConfigError, lambda: _layer(["a"], 2), _named, {"by": "name", "resize": {"films": "grow"}}, id="resize"
        ),
        pytest.param(ConfigError, lambda: _layer(["a"], 2), _named, {"resize": True}, id="resize-by-number"),
        pytest.param(_MISMATCH, _numbered, _named, _BY_NAME, id="no-vocabulary-in-the-layer"),
        pytest.param(_MISMATCH, lambda: _layer(["a"], 2), _without_names, _BY_NAME, id="no-vocabulary-in-the-file"),
        pytest.param(_MISMATCH, _numbered, _without_names, _BY_NAME, id="no-vocabulary"),
        pytest.param(_MISMATCH, lambda: _layer(Vocabulary([1], dtype="int64"), 2), _named, _BY_NAME, id="dtype"),
        pytest.param(_MISMATCH, lambda: _layer([], 2), _named, _BY_NAME, id="no-names-in-the-layer"),
        pytest.param(_MISMATCH, lambda: _layer(["a"], 2, 4), _named, _RESIZED, id="dim"),
        pytest.param(_MISMATCH, lambda: _layer(["a"], 5), _named, _BY_NAME, id="rows"),
        pytest.param(_MISMATCH, _two, _named_and_plain, _RESIZED, id="rows-by-number"),
        pytest.param(_MISMATCH, lambda: _layer(["a"], 2, 3, "accumulators"), _named, _BY_NAME, id="slots"),
        pytest.param(CheckpointCorruptError, lambda: _layer(["a"], 2), _damaged, _BY_NAME, id="damaged"),
    ],
)
def test_refusals(
    tmp_path: Path,
    kind: type[Exception],
    make: Callable[[], TPUEmbedding],
    write: Callable[[Path], str],
    options: dict[str, Any],
) -> None:
    with refused(kind):
        make().restore_tables(write(tmp_path), **options)


def test_by_number_names_follow_their_rows(tmp_path: Path) -> None:
    path, truth = _write(tmp_path, ["b", "a"], _rows(2, 3)), _rows(2, 3)[None]
    for names in ([], ["b"], ["b", "a"]):
        layer = _layer(names, 2)
        layer.restore_tables(path)
        assert_held(layer, {"films": {None: truth}})
        assert layer.vocabularies["films"].get_vocabulary() == ["b", "a"]
    for names in (["a"], ["b", "c"], ["a", "b"]):
        layer = _layer(names, 2)
        before = held(layer)
        with refused(CheckpointMismatchError):
            layer.restore_tables(path)
        assert_held(layer, before)


@pytest.mark.parametrize("slots", [True, False])
def test_rows_count_as_changed(tmp_path: Path, slots: bool) -> None:
    """A base of the layer, or of the checkpoint, has rows of other names at the numbers."""
    trained = named_layer({"films": _rows(3, 3)}, track_rows=True)
    trained.assign_rows("films", 1, np.ones((1, 3), np.float32))
    assert trained._row_stamps is not None
    saved = trained._row_stamps.history()
    path = write_named(tmp_path / "ckpt", trained, {"films": Vocabulary(["a", "b", "c"])})
    layer = _layer(["c", "a", "x", "y"], 4, track_rows=True)
    assert layer._row_stamps is not None
    own = layer._row_stamps.history()
    layer.restore_tables(path, by="name", resize=True, slots=slots)
    now, stamps = layer._row_stamps.history(), np.zeros(4, np.int32)
    layer._row_stamps.read_into("films", 0, stamps)
    if slots:  # a new history, which no base has
        assert not {token for token, _ in now.spans} & {token for token, _ in (*own.spans, *saved.spans)}
    else:
        assert now.spans[: len(own.spans)] == own.spans
        assert len(now.spans) == len(own.spans) + 1
        assert (stamps > own.updates).all()
        assert (stamps < UNKNOWN).all()


def test_every_copy_is_written(tmp_path: Path) -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        layer = _layer(["b", "a"], 2)
    truth = _rows(2, 3)
    layer.restore_tables(_write(tmp_path, ["a", "b"], truth), by="name")
    assert_held(layer, {"films": {None: truth[None][::-1]}})


@pytest.mark.parametrize("row", [1, 5], ids=["of a name", "spare"])
def test_a_row_for_unknown_names_cannot_move(tmp_path: Path, row: int) -> None:
    """The number stayed, and another name had its row; or the trained row was dropped."""
    table = TableConfig(6, 3, "films", out_of_vocabulary=row)
    trained = TPUEmbedding({"f": FeatureConfig(table, vocabulary=Vocabulary(["a", "b", "c"]))}, optimizer="sgd")
    path = tf.train.Checkpoint(layer=trained).write(str(tmp_path / "ckpt"))
    layer = _layer(Vocabulary(["b", "a", "c"]), 6)
    before = held(layer)["films"][None]
    with refused(ConfigError):
        layer.restore_tables(path, by="name")
    np.testing.assert_array_equal(held(layer)["films"][None], before)


def test_a_layer_without_names_warns_that_it_drops_them(tmp_path: Path) -> None:
    table = TableConfig(6, 3, "films")
    trained = TPUEmbedding({"f": FeatureConfig(table, vocabulary=Vocabulary(["a", "b", "c"]))}, optimizer="sgd")
    path = tf.train.Checkpoint(layer=trained).write(str(tmp_path / "ckpt"))
    layer = TPUEmbedding({"f": FeatureConfig(table)}, optimizer="sgd")
    with pytest.warns(UserWarning, match="'films' has names, and table 'films' of layer .* takes row numbers"):
        layer.restore_tables(path)
    np.testing.assert_array_equal(held(layer)["films"][None], held(trained)["films"][None])


def test_a_bucket_for_unknown_names_stays_one(tmp_path: Path) -> None:
    """With fewer buckets, a name got the row that unknown names have."""
    table = TableConfig(6, 3, "films", out_of_vocabulary=1)
    vocabulary = Vocabulary(["a", "b", "c"], oov_buckets=2)
    trained = TPUEmbedding({"f": FeatureConfig(table, vocabulary=vocabulary)}, optimizer="sgd")
    path = tf.train.Checkpoint(layer=trained).write(str(tmp_path / "ckpt"))
    with refused(ConfigError):
        _layer(Vocabulary(["b", "a", "c"]), 6).restore_tables(path, by="name", slots=False)
    _layer(Vocabulary(["b", "a", "c"], oov_buckets=2), 6).restore_tables(path, by="name", slots=False)


def test_features_of_row_numbers_are_named_when_rows_move(tmp_path: Path) -> None:
    table = TableConfig(6, 3, "films")
    features = {"f": FeatureConfig(table, vocabulary=Vocabulary(["a", "b", "c"])), "g": FeatureConfig(table)}
    path = tf.train.Checkpoint(layer=TPUEmbedding(features, optimizer="sgd")).write(str(tmp_path / "ckpt"))
    _layer(Vocabulary(["a", "b", "c", "d"]), 6).restore_tables(path, by="name", slots=False)
    with pytest.warns(UserWarning, match="takes row numbers, and rows get other numbers"):
        _layer(Vocabulary(["b", "a", "c"]), 6).restore_tables(path, by="name", slots=False)


def test_a_bucket_for_unknown_names_stays(tmp_path: Path) -> None:
    table = TableConfig(6, 3, "films", out_of_vocabulary=0)
    vocabulary = Vocabulary(["a", "b", "c"], oov_buckets=1)
    trained = TPUEmbedding({"f": FeatureConfig(table, vocabulary=vocabulary)}, optimizer="sgd")
    path = tf.train.Checkpoint(layer=trained).write(str(tmp_path / "ckpt"))
    layer = _layer(Vocabulary(["b", "a"], oov_buckets=1), 6)
    layer.restore_tables(path, by="name", slots=False)
    rows = held(trained)["films"][None]
    np.testing.assert_array_equal(held(layer)["films"][None][:3], rows[[0, 2, 1]])
