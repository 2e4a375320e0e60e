"""Lookup-only exports: every kind of feature against TensorFlow's own lookup of the same rows, through the C API."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.errors import CheckpointMismatchError, ConfigError, UnknownTableError
from tpuembed.manifest import Manifest

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

Array = npt.NDArray[Any]
VIDEOS, USERS = (40, 4), (30, 4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Array]]:
    """A checkpoint of two tables of one width, which share a stack, and one of another; and the tables' rows."""
    videos, users = TableConfig(*VIDEOS, "videos", combiner="sum"), TableConfig(*USERS, "users")
    other = TableConfig(1000, 16, "other")
    config = {"a": FeatureConfig(videos), "b": FeatureConfig(users), "c": FeatureConfig(other)}
    layer = TPUEmbedding(config, optimizer="adam")
    rows = {table.name: variable.numpy() for table, variable in layer.embedding_tables.items()}
    return tf.train.Checkpoint(layer=layer).write(str(tmp_path_factory.mktemp("ckpt") / "ckpt")), rows


def _export(checkpoint: tuple[str, Any], folder: Path, features: dict[str, Any], **options: Any) -> Path:
    return export_saved_model(checkpoint[0], folder / "m", serving_config={"features": features}, **options).path


IDS = np.array([[3, 1, 3, -1], [-1, -1, -1, -1], [-1, 7, -1, 2], [0, 29, 5, 6]])
WEIGHTS = np.array(
    [[0.5, 2.0, 1.0, 9.0], [9.0, 9.0, 9.0, 9.0], [3.0, 9.0, 9.0, 9.0], [0.25, 0.5, 1.5, 2.0]], np.float32
)


def _truth(table: Array, combiner: str, weighted: bool) -> Array:
    where = np.argwhere(IDS >= 0)
    ids = tf.SparseTensor(where, IDS[IDS >= 0], IDS.shape)
    weights = tf.SparseTensor(where, WEIGHTS[IDS >= 0], IDS.shape) if weighted else None
    found: Array = tf.nn.safe_embedding_lookup_sparse(table, ids, weights, combiner=combiner).numpy()
    return found


@pytest.mark.nightly
def test_every_kind_of_feature_equals_tensorflows_lookup(checkpoint: Any, tmp_path: Path) -> None:
    features: dict[str, Any] = {
        f"{table}/{combiner}{'_w' if weighted else ''}": {"table": table, "combiner": combiner, "weighted": weighted}
        for table in ("videos", "users")
        for combiner in ("sum", "mean", "sqrtn")
        for weighted in (False, True)
    }
    features |= {"one": {"table": "users", "input": "id"}, "sequence": {"table": "videos", "max_sequence_length": 3}}
    path = _export(checkpoint, tmp_path, features)
    inputs = {name: IDS for name in features if name != "one"} | {"one": IDS[:, 0] + 1}
    inputs |= {f"{name}_weights": WEIGHTS for name, spec in features.items() if spec.get("weighted")}
    found = capi.predict(path, inputs)
    assert set(found) == set(features)
    rows = checkpoint[1]
    for name, spec in features.items():
        if "combiner" in spec:
            truth = _truth(rows[spec["table"]], spec["combiner"], spec["weighted"])
            np.testing.assert_allclose(found[name], truth, atol=1e-6, err_msg=name)
    np.testing.assert_array_equal(found["one"], rows["users"][IDS[:, 0] + 1])
    sequence = np.where(IDS[:, :3, None] >= 0, rows["videos"][IDS[:, :3]], 0.0)
    np.testing.assert_array_equal(found["sequence"], sequence)


@pytest.mark.parametrize("form", ["id", "ids"])
def test_out_of_vocabulary_policies(checkpoint: Any, tmp_path: Path, form: str) -> None:
    features = {
        "zeros": {"table": "users", "input": form, "out_of_vocabulary": "zeros"},
        "row": {"table": "users", "input": form, "out_of_vocabulary": 2, "combiner": "sum"},
    }
    path = _export(checkpoint, tmp_path, features)
    ids = np.array([1, 30, -2, 2**40])
    rows = checkpoint[1]["users"]
    given = ids if form == "id" else np.stack([ids, np.full(4, -1)], 1)
    found = capi.predict(path, {"zeros": given, "row": given})
    np.testing.assert_array_equal(found["zeros"], [rows[1], *np.zeros((3, 4))])
    np.testing.assert_array_equal(found["row"], [rows[1], rows[2], rows[2], rows[2]])


@pytest.fixture(scope="module", params=["id", "ids"])
def of_form(request: pytest.FixtureRequest, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A form of lookups, and an export with one of it."""
    features = {"x": {"table": "users", "input": request.param}, "y": {"table": "videos"}}
    return request.param, _export(checkpoint, tmp_path_factory.mktemp(request.param), features)


@pytest.mark.parametrize("bad", [30, -2, 2**40])
@pytest.mark.sampled(2)
def test_an_id_outside_its_table_fails_by_default(of_form: tuple[str, Path], bad: int) -> None:
    form, path = of_form
    ids = np.array([1, bad])
    with pytest.raises(capi.TensorFlowError, match=f"feature x: id {bad} of row 1 is not in table users, which has 30"):
        capi.predict(path, {"x": ids if form == "id" else ids[:, None], "y": IDS})


@pytest.mark.nightly
def test_empty_batches_and_empty_rows(checkpoint: Any, tmp_path: Path) -> None:
    path = _export(checkpoint, tmp_path, {"x": {"table": "users"}, "one": {"table": "users", "input": "id"}})
    found = capi.predict(path, {"x": np.zeros((0, 3), np.int64), "one": np.zeros(0, np.int64)})
    assert found["x"].shape == found["one"].shape == (0, 4)
    found = capi.predict(path, {"x": np.zeros((2, 0), np.int64), "one": np.zeros(2, np.int64)})
    np.testing.assert_array_equal(found["x"], np.zeros((2, 4)))


def test_serialized_examples_take_lists_of_any_length(checkpoint: Any, tmp_path: Path) -> None:
    path = _export(
        checkpoint, tmp_path, {"x": {"table": "users", "weighted": True}, "one": {"table": "users", "input": "id"}}
    )

    def example(ids: list[int], weights: list[float], one: int) -> bytes:
        feature = {
            "x": tf.train.Feature(int64_list=tf.train.Int64List(value=ids)),
            "x_weights": tf.train.Feature(float_list=tf.train.FloatList(value=weights)),
            "one": tf.train.Feature(int64_list=tf.train.Int64List(value=[one])),
        }
        return bytes(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())

    examples = [example([1, 2], [1.0, 3.0], 4), example([], [], 5), example([7], [2.0], 6)]
    found = capi.predict(path, {"examples": examples}, "serving_examples")
    rows = checkpoint[1]["users"]
    np.testing.assert_allclose(found["x"], [(rows[1] + 3 * rows[2]) / 4, np.zeros(4), rows[7]], atol=1e-6)
    np.testing.assert_array_equal(found["one"], rows[[4, 5, 6]])


KINDS: dict[str, Any] = {
    "one": {"table": "users", "input": "id"},
    "some/policy": {"table": "users", "input": "id", "out_of_vocabulary": "zeros"},
    "list": {"table": "videos", "combiner": "sum"},
    "mean": {"table": "other"},
    "weighted": {"table": "users", "weighted": True, "combiner": "sqrtn"},
    "history": {"table": "videos", "max_sequence_length": 2},
}


@pytest.mark.nightly
def test_examples_of_every_kind_of_feature_are_answered_as_matrices_are(checkpoint: Any, tmp_path: Path) -> None:
    signatures = tf.saved_model.load(str(_export(checkpoint, tmp_path, KINDS))).signatures
    named: dict[str, Any] = {name: IDS[:, 0] + 1 if "input" in spec else IDS for name, spec in KINDS.items()}
    named["some/policy"] = np.array([0, 30, 1, -5])
    named["weighted_weights"] = WEIGHTS
    examples = [tf.train.Example() for _ in IDS]
    for row, example in enumerate(examples):
        length = max(np.flatnonzero(IDS[row] >= 0), default=-1) + 1
        for name, values in named.items():
            feature = example.features.feature[name]
            present = values[row : row + 1] if values.ndim == 1 else values[row][:length]
            (feature.float_list if name.endswith("_weights") else feature.int64_list).value.extend(present.tolist())
    found = signatures["serving_examples"](examples=tf.constant([each.SerializeToString() for each in examples]))
    truth = signatures["serving_default"](**{name: tf.constant(values) for name, values in named.items()})
    assert set(found) == set(KINDS)
    for name in KINDS:
        np.testing.assert_array_equal(found[name], truth[name], err_msg=name)
    examples[0].features.feature["weighted_weights"].float_list.value.pop()
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many values of weighted_weights as of weighted"):
        signatures["serving_examples"](examples=tf.constant([each.SerializeToString() for each in examples]))


def test_weights_of_another_shape_than_the_ids_fail(checkpoint: Any, tmp_path: Path) -> None:
    """Also where all features' ids and weights are as many: no weight is taken for another feature's id."""
    features = {name: {"table": "users", "weighted": True} for name in "xy"}
    signature = tf.saved_model.load(str(_export(checkpoint, tmp_path, features))).signatures["serving_default"]
    ids, weights = np.ones((2, 2), np.int64), np.ones((2, 2), np.float32)
    assert signature(x=ids, y=ids, x_weights=weights, y_weights=weights)["x"].shape == (2, 4)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="the weights must have the shape of the ids; features x, y"
    ):
        signature(x=ids, y=ids[:, :1], x_weights=weights[:, :1], y_weights=weights)


@pytest.mark.nightly
def test_without_a_serving_config_the_layers_own_features_are_served(checkpoint: Any, tmp_path: Path) -> None:
    report = export_saved_model(checkpoint[0], tmp_path / "m")
    found = capi.predict(report.path, dict.fromkeys("abc", IDS))
    np.testing.assert_allclose(found["a"], _truth(checkpoint[1]["videos"], "sum", False), atol=1e-6)
    np.testing.assert_allclose(found["b"], _truth(checkpoint[1]["users"], "mean", False), atol=1e-6)
    assert found["c"].shape == (4, 16)


def test_a_subset_writes_only_its_tables_bytes(checkpoint: Any, tmp_path: Path) -> None:
    report = export_saved_model(checkpoint[0], tmp_path / "m", tables=["users"])
    assert report.tables == ("users",)
    assert report.dropped_features == ("a", "c")
    assert report.bytes_written == USERS[0] * USERS[1] * 4
    sizes = sorted(file.stat().st_size for file in (report.path / "variables").glob("variables.data-*"))
    assert sizes[-1] < 2048, "the object graph is the rest"
    assert sum(sizes) >= report.bytes_written
    assert report.bytes_written in sizes
    manifest = Manifest.read(report.path)
    assert manifest is not None
    assert [table.name for table in manifest.tables] == ["users"]
    np.testing.assert_allclose(
        capi.predict(report.path, {"b": IDS})["b"], _truth(checkpoint[1]["users"], "mean", False), atol=1e-6
    )


@pytest.mark.parametrize(
    ("features", "options", "error"),
    [
        ({"x": {"table": "user"}}, {}, UnknownTableError),
        ({"x": {"table": "users", "out_of_vocabulary": 30}}, {}, ConfigError),
        ({"_x": {"table": "users"}}, {}, ConfigError),
        ({"a b": {"table": "users"}}, {}, ConfigError),
        ({"x": {"table": "users"}}, {"tables": ["videos"]}, ConfigError),
        ({"x": {"table": "users"}}, {"tables": []}, ConfigError),
        ({"x": {"table": "users"}}, {"tables": ["nope"]}, UnknownTableError),
        ({"x": {"table": "users"}}, {"storage": "int4"}, ConfigError),
        ({"x": {"table": "users"}}, {"storage": {"users": "int4"}}, ConfigError),
        ({"x": {"table": "users"}}, {"storage": {"user": "int8"}}, UnknownTableError),
        ({"x": {"table": "users"}}, {"layout": "paged"}, ConfigError),
        ({"x": {"table": "users"}}, {"serving_root": "/m"}, ConfigError),
        ({"x": {"table": "users"}}, {"layout": "mmap", "serving_root": "m"}, ConfigError),
        ({"x": {"table": "users"}}, {"engine": "beam"}, ConfigError),
        ({"x": {"table": "users"}}, {"workers": 0}, ConfigError),
    ],
)
def test_a_request_that_cannot_be_answered_leaves_nothing(
    checkpoint: Any, tmp_path: Path, features: Any, options: Any, error: type[Exception]
) -> None:
    with refused(error):
        _export(checkpoint, tmp_path, features, **options)
    assert not any((tmp_path / "m").glob("*")) if (tmp_path / "m").exists() else True


@pytest.mark.parametrize("size", [{"vocabulary_size": 31}, {"dim": 5}])
def test_a_size_that_disagrees_with_the_checkpoint_is_refused(checkpoint: Any, tmp_path: Path, size: Any) -> None:
    config = {"features": {"x": {"table": "users"}}, "tables": {"users": size}}
    with refused(CheckpointMismatchError):
        export_saved_model(checkpoint[0], tmp_path / "m", serving_config=config)


def test_an_empty_list_is_no_matrix_of_ids(checkpoint: Any, tmp_path: Path) -> None:
    """JSON's `{"inputs": []}` has the shape [0], also in TensorFlow Serving."""
    path = _export(checkpoint, tmp_path, {"ids": {"table": "videos", "combiner": "sum"}})
    with pytest.raises(capi.TensorFlowError, match="out of bounds"):
        capi.predict(path, {"ids": np.zeros(0, np.int64)})
