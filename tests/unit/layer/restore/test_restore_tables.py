"""`restore_tables`: what it moves, what it refuses, and that it then has moved nothing."""

import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.goldens import read_golden
from tests.support.layer.restored import Array, Tables, assert_held, held, layer_for, updates
from tests.support.messages import refused
from tpuembed import FTRL, FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    ConfigError,
    UnknownTableError,
)
from tpuembed.runtime.table_scope import deferred_tables


def _random(rows: int, dim: int, *slots: str) -> dict[str | None, Array]:
    rng = np.random.default_rng(rows * 31 + dim)
    return {slot: rng.normal(size=(rows, dim)).astype(np.float32) for slot in (None, *slots)}


TRUTH: Tables = {
    "videos": _random(9, 4, "momenta", "velocities"),
    "users/v.1": _random(5, 2, "accumulators"),
    "plain": _random(3, 2),
}


def _write(path: Path, tables: Tables, count: int = 7, **options: Any) -> str:
    """A checkpoint of a layer with these numbers, by TensorFlow."""
    layer = layer_for(tables, **options)
    for name, variable in layer.named_variables().items():
        table, _, slot = (name, "", None) if name in tables else name.rpartition("/")
        variable.assign(tables[table][slot])
    layer.updates.assign(count)
    return str(tf.train.Checkpoint(layer=layer).write(str(path / "ckpt")))


def _write_plain(path: Path, **tables: Any) -> str:
    """A checkpoint of variables without a layer, by TensorFlow."""
    variables = {name: tf.Variable(rows) for name, rows in tables.items()}
    return str(tf.train.Checkpoint(**variables).write(str(path / "plain")))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _write(tmp_path_factory.mktemp("own"), TRUTH)


def _features(**tables: tuple[int, int]) -> dict[str, FeatureConfig]:
    return {name: FeatureConfig(TableConfig(*shape, name)) for name, shape in tables.items()}


def test_tables_slots_and_count_of_an_own_checkpoint(prefix: str) -> None:
    layer = layer_for(TRUTH)
    report = layer.restore_tables(prefix)
    assert_held(layer, TRUTH)
    assert report.updates == updates(layer) == 7
    assert report.path == prefix
    assert [(plan.table, plan.rows, plan.new_rows, plan.slots) for plan in report.tables] == [
        ("videos", 9, 0, ("momenta", "velocities")),
        ("users/v.1", 5, 0, ("accumulators",)),
        ("plain", 3, 0, ()),
    ]


@pytest.mark.parametrize("ending", ["weights.h5", "keras"])
def test_keras_files(tmp_path: Path, ending: str) -> None:
    inputs = keras.Input((), dtype="int64")
    trained, layer = (TPUEmbedding(FeatureConfig(TableConfig(6, 3, "t")), optimizer="adagrad") for _ in range(2))
    model = keras.Model(inputs, keras.layers.Dense(1)(trained(inputs)))
    model.compile("sgd", "mse")
    model.fit(np.arange(4), np.ones(4), epochs=3, verbose=0)
    path = tmp_path / f"model.{ending}"
    model.save(path) if ending == "keras" else model.save_weights(path)
    assert layer.restore_tables(path).updates == updates(layer) == 3
    assert_held(layer, held(trained))
    if ending == "keras":  # whose archive has a CRC32 of the weights
        data = bytearray(path.read_bytes())
        data[data.index(held(trained)["t"][None].tobytes())] ^= 1
        path.write_bytes(data)
        before = held(layer)
        with pytest.raises(CheckpointCorruptError, match="its bytes have the CRC32"):
            layer.restore_tables(path)
        assert_held(layer, before)


def test_without_slots_slots_and_count_stay(prefix: str) -> None:
    layer = layer_for(TRUTH)
    before = held(layer)
    report = layer.restore_tables(prefix, slots=False)
    assert_held(layer, {name: {**before[name], None: TRUTH[name][None]} for name in TRUTH})
    assert report.updates is None
    assert updates(layer) == 0


def test_the_count_needs_only_the_tables_that_the_layer_trains(prefix: str) -> None:
    frozen = TPUEmbedding(FeatureConfig(TableConfig(3, 2, "plain")), optimizer=None)
    assert frozen.restore_tables(prefix, ["plain"]).updates is None
    trained = TPUEmbedding(FeatureConfig(TableConfig(3, 2, "plain")), optimizer="sgd")
    assert trained.restore_tables(prefix, ["plain"]).updates == updates(trained) == 7


# ---- grown and shrunk vocabularies


def _seeded(rows: int, seed: int = 5) -> TPUEmbedding:
    """Glorot's bounds depend on the number of rows, so a part drawn by itself would be another one."""
    initializer = keras.initializers.GlorotUniform(seed=seed)
    return TPUEmbedding(FeatureConfig(TableConfig(rows, 4, "videos", initializer=initializer)), optimizer="adam")


def test_grown_rows_begin_anew_even_after_training(prefix: str) -> None:
    layer, fresh = _seeded(20), held(_seeded(20))["videos"]
    layer.restore_tables(prefix, {"videos": "videos"}, resize={"videos": "grow"})
    for slot in (None, "momenta", "velocities"):
        layer.assign_rows("videos", 9, np.full((11, 4), 8, np.float32), slot)
    report = layer.restore_tables(prefix, ["videos"], resize={"videos": "grow"})
    assert_held(
        layer,
        {"videos": {slot: np.concatenate([rows, fresh[slot][9:]]) for slot, rows in TRUTH["videos"].items()}},
    )
    (plan,) = report.tables
    assert (plan.rows, plan.new_rows, plan.skipped_rows) == (9, 11, 0)


def test_the_default_initializer_draws_every_new_row(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, of different numbers, with the deviation of a whole table."""
    monkeypatch.setattr("tpuembed.backends.table_rows.PIECE_BYTES", 4 * 4 * 100)
    layer = TPUEmbedding(_features(videos=(4009, 4)), optimizer="adam")
    layer.assign_rows("videos", 0, np.zeros((4009, 4), np.float32))
    layer.restore_tables(prefix, ["videos"], resize={"videos": "grow"})
    rows = held(layer)["videos"][None]
    np.testing.assert_array_equal(rows[:9], TRUTH["videos"][None])
    assert len(np.unique(rows[9:])) > 15_500  # of 16,000 drawn
    assert rows[9:].std() == pytest.approx(0.5 * 0.8796, rel=0.03)  # a normal of 1/sqrt(dim) cut at two deviations


def test_slots_of_grown_rows_begin_at_their_initial_values(tmp_path: Path) -> None:
    prefix = _write(tmp_path, {"t": _random(5, 2, "accumulators", "linears")})
    layer = TPUEmbedding(_features(t=(8, 2)), optimizer=FTRL(initial_accumulator_value=0.25))
    for slot in ("accumulators", "linears"):
        layer.assign_rows("t", 0, np.full((8, 2), 3, np.float32), slot)
    layer.restore_tables(prefix, resize={"t": "grow"})
    found = held(layer)["t"]
    np.testing.assert_array_equal(found["accumulators"][5:], np.full((3, 2), 0.25))
    np.testing.assert_array_equal(found["linears"][5:], np.zeros((3, 2)))
    layer.assign_rows("t", 5, np.full((3, 2), 3, np.float32), "linears")
    layer.restore_tables(prefix, slots=False, resize={"t": "grow"})
    np.testing.assert_array_equal(held(layer)["t"]["linears"][5:], np.full((3, 2), 3))


# ---- dtypes


def test_float64_is_rounded_where_that_is_asked_for(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(9, 4))
    prefix = _write_plain(tmp_path, t=rows)
    layer = TPUEmbedding(_features(t=(9, 4)), optimizer="sgd")
    before = held(layer)
    with refused(CheckpointMismatchError, match="table 't'"):
        layer.restore_tables(prefix)
    assert_held(layer, before)
    layer.restore_tables(prefix, lossy=True)
    np.testing.assert_array_equal(held(layer)["t"][None], tf.cast(rows, tf.float32).numpy())


def test_a_number_beyond_float32_is_not_made_infinite(tmp_path: Path) -> None:
    layer = TPUEmbedding(_features(t=(2, 2)), optimizer="sgd")
    prefix = _write_plain(tmp_path, t=np.array([[1.0, 2.0], [3.0, 1e300]]))
    with refused(CheckpointMismatchError):
        layer.restore_tables(prefix, lossy=True)


# ---- refusals; nothing is written


def _refused(layer: TPUEmbedding, error: type[Exception], match: str, *args: Any, **options: Any) -> None:
    before, count = held(layer), updates(layer)
    with pytest.raises(error, match=match):
        layer.restore_tables(*args, **options)
    assert_held(layer, before)
    assert updates(layer) == count


def test_slots_that_the_layer_lacks_are_refused(prefix: str) -> None:
    match = r"has slots 'accumulators'\. Table 'users/v.1' of .* \(sgd\) has no slots"
    _refused(layer_for({**TRUTH, "users/v.1": _random(5, 2)}), CheckpointMismatchError, match, prefix)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"tables": ["video"]}, UnknownTableError, "layer .*: has no table 'video'; did you mean 'videos'"),
        ({"tables": {"videos": "vids"}}, UnknownTableError, "has no table 'vids' for the layer's table 'videos'; did"),
        ({"tables": "videos"}, ConfigError, r"tables must be a list of names or a mapping, got 'videos'"),
        ({"tables": []}, ConfigError, "tables is empty"),
        ({"slots": "momenta"}, ConfigError, "slots must be True or False"),
        ({"lossy": 1}, ConfigError, "lossy must be True or False"),
        ({"resize": ["videos"]}, ConfigError, "resize must be a mapping such as"),
        ({"resize": {"video": "grow"}}, UnknownTableError, "has no table 'video'"),
        ({"resize": {"videos": "larger"}}, ConfigError, r"resize\['videos'\] must be 'grow' or 'shrink', got 'larger'"),
        ({"resize": {"videos": "grow"}, "tables": ["plain"]}, ConfigError, "resize names table 'videos', which is not"),
        ({"partition_strategy": "div"}, ConfigError, "partition_strategy is only for checkpoints of TensorFlow 1"),
        ({"nonsense": 1}, ConfigError, "nonsense"),
    ],
)
def test_a_request_that_makes_no_sense(prefix: str, options: Any, error: type[Exception], match: str) -> None:
    _refused(layer_for(TRUTH), error, match, prefix, **options)


def test_linears_of_another_meaning_are_refused(tmp_path: Path) -> None:
    prefix = _write(tmp_path, {"t": _random(5, 2, "accumulators", "linears")})
    layer = TPUEmbedding(_features(t=(5, 2)), optimizer=FTRL(multiply_linear_by_learning_rate=True))
    match = r"multiply_linear_by_learning_rate=False\. .*=True, so its linears have another scale"
    _refused(layer, CheckpointMismatchError, match, prefix)
    layer.restore_tables(prefix, slots=False)


def test_layers_with_different_counts_are_refused(tmp_path: Path) -> None:
    first, second = layer_for({"a": _random(3, 2)}), layer_for({"b": _random(4, 2)})
    first.updates.assign(3)
    second.updates.assign(5)
    prefix = tf.train.Checkpoint(first=first, second=second).write(str(tmp_path / "two"))
    layer = layer_for({"a": _random(3, 2), "b": _random(4, 2)})
    _refused(layer, CheckpointMismatchError, r"different numbers of updates \(\{'a': 3, 'b': 5\}\)", prefix)
    for table in ("a", "b"):
        assert layer.restore_tables(prefix, [table]).updates is None
    assert_held(layer, {**held(first), **held(second)})
    second.updates.assign(3)
    assert (
        layer.restore_tables(tf.train.Checkpoint(first=first, second=second).write(str(tmp_path / "eq"))).updates == 3
    )


def _damage(file: Path, rows: Array) -> None:
    """Flip one bit of a row in a data file."""
    data = bytearray(file.read_bytes())
    data[data.index(rows.tobytes()) + 3] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("slot", [None, "accumulators"])
def test_damage_is_noticed(tmp_path: Path, slot: str | None) -> None:
    """Where the rows end. Before anything is written, where a part of them is read, or of a stack."""
    rows = _random(50, 4, "accumulators")
    prefix = _write(tmp_path, {"t": rows})
    _damage(Path(f"{prefix}.data-00000-of-00001"), rows[slot][20])
    with refused(CheckpointCorruptError, match="table 't'") as caught:
        layer_for({"t": rows}).restore_tables(prefix)
    assert "partly restored" in caught.value.__notes__[0]
    if slot is not None:
        layer_for({"t": {None: rows[None]}}).restore_tables(prefix, slots=False)
    smaller = layer_for({"t": {name: part[:30] for name, part in rows.items()}})
    _refused(smaller, CheckpointCorruptError, "CRC|checksum", prefix, resize={"t": "shrink"})
    golden = read_golden("tpu/sparse_cores_8_adam")
    shutil.copytree(golden.path.parent, tmp_path / "golden")
    _damage(tmp_path / "golden" / "ckpt.data-00000-of-00001", golden.tables["lone"][slot and "velocities"][1])
    _refused(layer_for(golden.tables), CheckpointCorruptError, "CRC|checksum", tmp_path / "golden" / "ckpt")


def test_a_layer_inside_an_export_has_no_tables(prefix: str) -> None:
    class Source:
        def register(self, table: Any) -> None: ...

        def lookup(self, features: Any, tables: Any) -> list[Any]:
            return []

        def answer(self, features: Any, look_up: Any) -> list[Any]:
            return []

        def table(self, name: str) -> Any: ...

        def name_arrays(self, table: str, given: Any = None) -> Any: ...

        def note_numbers(self, table: str, feature: str | None = None) -> None: ...

    with deferred_tables(Source()):
        layer = TPUEmbedding(_features(plain=(3, 2)), optimizer="sgd")
    with refused(ConfigError, match="restore_tables"):
        layer.restore_tables(prefix)


def test_a_graph_writes_nothing(prefix: str) -> None:
    layer = layer_for(TRUTH)
    with refused(ConfigError, match="restore_tables"):
        tf.function(lambda: layer.restore_tables(prefix))()
