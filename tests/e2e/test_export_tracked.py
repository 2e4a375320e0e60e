"""Overlays of layers that track rows: stamps say which rows to write, and the answers are those of a full export."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tests.support.export.overlays import overlays_of_any_size
from tests.support.messages import refused, said
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, compact_version, export_model, export_saved_model
from tpuembed.checkpoint.tools import diff_checkpoints, verify_files
from tpuembed.errors import ConfigError, ExportError
from tpuembed.export import plan_saved_model
from tpuembed.export.report import ExportReport
from tpuembed.manifest import Manifest

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

Array = npt.NDArray[Any]
ROWS = {"users": 300, "items": 70}


def make(**options: Any) -> TPUEmbedding:
    keras.utils.set_random_seed(1)
    tables = {name: TableConfig(rows, 8, name) for name, rows in ROWS.items()}
    features = {"user": FeatureConfig(tables["users"]), "item": FeatureConfig(tables["items"])}
    return TPUEmbedding(features, "adagrad", name="embedding", **({"track_rows": True} | options))


def step(layer: TPUEmbedding, users: Any, items: Any = (1,)) -> None:
    with tf.GradientTape() as tape:
        rows = layer({"user": tf.constant(users, tf.int64), "item": tf.constant(items, tf.int64)})
        loss = tf.add_n([tf.reduce_sum((each - 1) ** 2) for each in tf.nest.flatten(rows)])
    tape.gradient(loss, layer.trainable_variables)


def answers(report: ExportReport) -> dict[str, Array]:
    """All rows of both tables; of one feature per row, or of lists."""
    loaded = tf.saved_model.load(str(report.path))
    lookup = loaded.signatures["serving_default"]
    ids = {name: tf.range(300, dtype=tf.int64) % ROWS[f"{name}s"] for name in ("user", "item")}
    shapes = {name: [-1, 1][: spec.shape.rank] for name, spec in lookup.structured_input_signature[1].items()}
    found = lookup(**{name: tf.reshape(value, shapes[name]) for name, value in ids.items()})
    return {name: value.numpy() for name, value in found.items()}


def assert_same(report: ExportReport, full: ExportReport) -> None:
    """Both answer alike for all rows, have the same rows, and have the checksums that they say."""
    one, other = answers(report), answers(full)
    for name, value in one.items():
        assert value.tobytes() == other[name].tobytes(), name
    assert not diff_checkpoints(report.path, full.path).differs
    assert not verify_files(report.path).damaged


FILES = [
    ("ckpt", "mmap", "float32"),
    ("model.keras", "variables", "int8"),
    ("model.weights.h5", "mmap", "float32"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "layout", "storage"), FILES)
@overlays_of_any_size()
def test_of_files(tmp_path: Path, name: str, layout: str, storage: str) -> None:
    users, items = (keras.Input((), dtype="int64", name=name) for name in ("user", "item"))
    layer = make()
    found = layer({"user": users, "item": items})
    model = keras.Model({"user": users, "item": items}, keras.layers.Concatenate()([found["user"], found["item"]]))

    def saved(number: int) -> Path:
        folder = tmp_path / str(number)
        folder.mkdir()
        if name == "ckpt":
            tf.train.Checkpoint(model=model).write(str(folder / name))
        else:
            (model.save if name.endswith(".keras") else model.save_weights)(folder / name)
        return folder / name

    config = {"features": {"user": {"table": "users", "input": "id"}, "item": {"table": "items", "input": "id"}}}
    options: dict[str, Any] = {"layout": layout, "storage": storage, "serving_config": config}
    step(layer, [1, 2, 250], [3])
    export_saved_model(saved(1), tmp_path / "m", **options)
    step(layer, [2, 7, 299], [69])
    path = saved(2)
    report = export_saved_model(path, tmp_path / "m", base=1, **options)
    assert (report.rows_changed, report.rows_compared) == (4, 0)
    assert_same(report, export_saved_model(path, tmp_path / "full", **options))
    made = Manifest.read(report.path)
    assert made
    assert all(stack.overlay is None or stack.overlay.crc32c is not None for stack in made.stacks)
    step(layer, [5])
    report = export_model(layer, tmp_path / "m", base=1, layout=layout, storage=storage)
    assert (report.rows_changed, report.rows_compared) == (6, 0)  # the same training, without a file in between


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*this training did not pass through it")
def test_another_history_is_compared(tmp_path: Path) -> None:
    """Stamps are used only if the training passed through the base."""
    layer = make()
    step(layer, [1, 2])
    tf.train.Checkpoint(layer=layer).write(str(tmp_path / "ckpt"))
    export_model(layer, tmp_path / "m")

    @overlays_of_any_size()
    def compared(layer: TPUEmbedding, rows: int) -> ExportReport:
        report = export_model(layer, tmp_path / "m", base=1)
        assert report.rows_compared == rows
        assert_same(report, export_model(layer, tmp_path / "full"))
        return report

    step(layer, [3])
    assert compared(layer, 0).rows_changed == 2
    layer.assign_rows("users", 9, np.ones((1, 8), np.float32))
    assert compared(layer, 0).rows_changed == 3
    tf.train.Checkpoint(layer=layer).read(str(tmp_path / "ckpt")).assert_consumed()
    step(layer, [11])
    report = compared(layer, 0)  # the base is the state of the checkpoint
    assert report.rows_changed == 2
    layer.set_weights([value + 1 for value in layer.get_weights()])
    with pytest.warns(UserWarning, match="more than 15%"):
        assert export_model(layer, tmp_path / "m", base=1).base is None
    other = make()
    step(other, [1, 5])
    assert compared(other, sum(ROWS.values())).rows_changed
    assert compared(make(track_rows=False), sum(ROWS.values())).rows_changed


@pytest.mark.nightly
def test_a_base_that_was_not_checked_is_compared(tmp_path: Path) -> None:
    """An option that bounds all rows holds for those that are not read."""
    layer = make()
    step(layer, [1])
    layer.assign_rows("users", 200, np.full((1, 8), np.nan, np.float32))
    export_model(layer, tmp_path / "m", storage="float32")
    step(layer, [2])
    assert export_model(layer, tmp_path / "m", base=1).rows_compared == 0
    with pytest.warns(UserWarning, match="written without require_finite"), refused(ExportError):
        export_model(layer, tmp_path / "m", base=1, require_finite=True)
    layer.assign_rows("users", 200, np.full((1, 8), 100, np.float32))
    base = export_model(layer, tmp_path / "n", storage="int8", require_finite=True)
    step(layer, [3])
    bound = base.errors["users"].max_abs
    over: dict[str, Any] = {"base": 1, "storage": "int8", "require_finite": True}
    assert export_model(layer, tmp_path / "n", max_error=bound, **over).rows_compared == 0
    with pytest.warns(UserWarning, match="above max_error"), refused(ExportError):
        export_model(layer, tmp_path / "n", max_error=bound / 2, **over)
    layer.assign_rows("users", 4, np.full((1, 8), np.nan, np.float32))
    with refused(ExportError):
        export_model(layer, tmp_path / "n", **over)  # a row that is read


@pytest.mark.nightly
def test_compact_proves_what_nobody_read(tmp_path: Path) -> None:
    layer = make()
    step(layer, [1])
    export_model(layer, tmp_path / "m")
    step(layer, [2])
    overlay = export_model(layer, tmp_path / "m", base=1)
    full = export_model(layer, tmp_path / "full")
    report = compact_version(tmp_path / "m")
    made, truth = Manifest.read(report.path), Manifest.read(full.path)
    assert made
    assert truth
    assert (made.base, made.stacks, made.tables, made.histories) == (None, truth.stacks, truth.tables, truth.histories)
    for stack in made.stacks:
        assert (report.path / stack.file).read_bytes() == (full.path / stack.file).read_bytes()
    step(layer, [4])
    after = export_model(layer, tmp_path / "m", base="latest")
    assert (after.base, after.rows_changed, after.rows_compared) == (3, 2, 0)  # user 4, item 1
    entry = Manifest.read(overlay.path)
    assert entry
    assert entry.stacks[0].overlay
    file = overlay.path / entry.stacks[0].overlay.words.file
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with refused(ExportError):
        compact_version(tmp_path / "m", overlay.version)


def whole_model(**options: Any) -> Any:
    layer = make(**options)
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "item")}
    rows = layer(inputs)
    return keras.Model(inputs, keras.layers.Dense(1, name="score")(rows["user"] * rows["item"])), layer


@pytest.mark.parametrize("layout", ["mmap", "variables"])
@pytest.mark.nightly
def test_whole_models_are_exported_without_stamps(tmp_path: Path, layout: str) -> None:
    weights = []
    for track_rows in (True, False):
        model, layer = whole_model(track_rows=track_rows)
        folder = tmp_path / str(track_rows)
        export_model(model, folder, layout=layout)
        step(layer, [1, 2])
        export_model(model, folder, layout=layout, base=1)
        for bundle in sorted(folder.rglob("variables.index")):
            reader = tf.train.load_checkpoint(str(bundle.with_suffix("")))
            shapes = reader.get_variable_to_shape_map()
            weights.append({name: shape for name, shape in shapes.items() if name.startswith("dense/")})
    assert weights[0]
    assert all(each == weights[0] for each in weights)


@pytest.mark.nightly
def test_a_base_of_another_kind_or_layout(tmp_path: Path) -> None:
    """Its clients would get another signature, or its servers would load what they mapped."""
    model, layer = whole_model()
    export_model(model, tmp_path / "m", layout="mmap")
    for base in (1, "latest"):
        with refused(ConfigError):
            export_model(layer, tmp_path / "m", layout="mmap", base=base)
    tf.train.Checkpoint(layer=layer).write(str(tmp_path / "ckpt"))
    for call in (plan_saved_model, export_saved_model):
        with refused(ConfigError):
            call(tmp_path / "ckpt", tmp_path / "m", base="latest")
    with pytest.warns(UserWarning, match="layout") as warnings:
        export_model(model, tmp_path / "m", base=1)
    said(str(warnings[0].message))
    export_model(layer, tmp_path / "l")
    with refused(ConfigError):
        export_model(model, tmp_path / "l", base=1)
    plan = plan_saved_model(tmp_path / "ckpt", tmp_path / "l", base="latest")
    assert plan.base == 1
    assert "an overlay of version 1" in plan.describe()
