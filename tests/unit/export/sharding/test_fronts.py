"""Whole models on several servers: shards that look up, and a front with the rest, which answer as the whole export."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml

from tests.support import capi
from tests.support.export import whole_model
from tests.support.export.fronts import Front, OutsideError, load, native
from tests.support.export.in_process import exports_in_this_process
from tests.support.messages import refused
from tpuembed import (
    FeatureConfig,
    TableConfig,
    TPUEmbedding,
    Vocabulary,
    export_saved_model,
    export_shards,
    rollback_version,
)
from tpuembed.errors import ConfigError, ExportError
from tpuembed.export.run import run_export
from tpuembed.export.sharding import export as sharding
from tpuembed.export.sharding.export import plan_shards
from tpuembed.export.sharding.plan import SplitFeature
from tpuembed.manifest import MANIFEST_PATH, Manifest
from tpuembed.native_lookup import available

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore:Leaving out the signature serving_examples", "ignore:no requests to warm up"),
]

Array = np.ndarray[Any, Any]
SPLIT = {"a_mean": 2, "b_mean": 3, "c_sqrtn": 2, "d_mean": 3, "e_sqrtn": 2}


@pytest.fixture(scope="module", autouse=True)
def exports_here() -> Iterator[None]:
    with exports_in_this_process():
        yield


class Exported:
    """One checkpoint, exported for one server and for several."""

    def __init__(self, folder: Path, build: Any, **options: Any) -> None:
        self.folder, self.model = folder, build()
        self.checkpoint = tf.train.Checkpoint(model=self.model).write(str(folder / "ckpt"))
        layout = options.setdefault("layout", "variables")
        self.version = export_saved_model(self.checkpoint, folder / "whole", model=build, layout=layout).path
        export_shards(self.checkpoint, folder / "s", model=build, **options)
        self.whole, self.front = load(self.version), Front(folder / "s")


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(tmp_path_factory.mktemp("ids"), whole_model.build, shards=3)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(tmp_path_factory.mktemp("split"), lazy_model, shards=3, split=SPLIT, layout="mmap")


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(tmp_path_factory.mktemp("named"), names_model, shards=2, layout="mmap")


def lazy_model() -> Any:
    return whole_model.build(is_lazy=True)


USERS = [f"user {number}" for number in range(30)]


def names_model() -> Any:
    """Return a model whose features take names, and its outputs are the activations."""
    users, items = TableConfig(30, 4, "users"), TableConfig(22, 4, "items", combiner="sqrtn")
    weighed = TableConfig(30, 4, "weighed", combiner="mean", out_of_vocabulary="zeros")
    by_name, by_number = Vocabulary(USERS), Vocabulary(range(100, 120), dtype="int64", oov_buckets=2)
    inputs = {
        "user": keras.Input((), dtype="string", name="user"),
        "pair": keras.Input((2,), dtype="string", name="pair"),
        "friends": keras.Input((None,), dtype="string", ragged=True, name="friends"),
        "friends_weights": keras.Input((None,), dtype="float32", ragged=True, name="friends_weights"),
        "items": keras.Input((None,), dtype="int64", sparse=True, name="items"),
        "row": keras.Input((), dtype="int64", name="row"),
    }
    configs = {
        "user": FeatureConfig(users, vocabulary=by_name),
        "pair": FeatureConfig(users, vocabulary=by_name, out_of_vocabulary=3),
        "friends": FeatureConfig(weighed, vocabulary=by_name),
        "items": FeatureConfig(items, vocabulary=by_number),
        "row": FeatureConfig(TableConfig(9, 4, "rows")),
    }
    layer = TPUEmbedding(configs, optimizer="sgd")
    weights = {**dict.fromkeys(configs), "friends": inputs["friends_weights"]}
    found = layer({name: inputs[name] for name in configs}, weights)
    return keras.Model(inputs, {f"{n}_out": keras.layers.Identity(name=f"{n}_out")(v) for n, v in found.items()})


def draw_names(random: np.random.Generator, batch: int, hot: int) -> dict[str, Array]:
    names = np.array([*(name.encode() for name in USERS), b"nobody"], object)
    friends = names[random.integers(0, 31, (batch, hot))]
    friends[np.arange(hot) >= random.integers(0, hot + 1, (batch, 1))] = b""
    items = random.integers(95, 125, (batch, hot))
    return {
        "user": names[random.integers(0, 30, batch)],
        "pair": names[random.integers(0, 31, (batch, 2))],
        "friends": friends,
        "friends_weights": np.where(friends == b"", np.nan, random.random((batch, hot)) + 0.1).astype(np.float32),
        "items": np.where(random.random((batch, hot)) < 0.2, -1, items),
        "row": random.integers(0, 9, batch),
    }


def manifests(exported: Exported) -> tuple[Manifest, Manifest]:
    whole, front = Manifest.read(exported.version), Manifest.read(exported.folder / "s" / "front" / "1")
    assert whole is not None
    assert front is not None
    return whole, front


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("batch", "hot"), [(1, 1), (7, 5), (3, 0), (0, 2), (40, 20)])
def test_answers_are_those_of_the_whole_model(ids: Exported, batch: int, hot: int) -> None:
    inputs = whole_model.draw(np.random.default_rng(batch + hot), batch, hot)
    expected = ids.whole(inputs)
    found = ids.front.run(inputs)
    assert found.keys() == expected.keys()
    np.testing.assert_array_equal(found["score"], expected["score"])


@pytest.mark.parametrize("seed", range(4))
def test_answers_to_names_are_those_of_the_whole_model(named: Exported, seed: int) -> None:
    inputs = draw_names(np.random.default_rng(seed), 6, seed * 2)
    expected = named.whole(inputs)
    for name, found in named.front.run(inputs).items():
        np.testing.assert_array_equal(found, expected[name], err_msg=name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
def test_answers_of_parts_add_up_to_those_of_the_whole_model(split: Exported, seed: int) -> None:
    inputs = whole_model.draw(np.random.default_rng(seed), 6, seed * 2)
    if seed % 2:
        inputs["light"] = np.where(np.random.default_rng(seed).random(inputs["light"].shape) < 0.2, -7, inputs["light"])
        inputs["light_weights"] = np.where(inputs["light"] == -1, 0, np.float32(0.75))
    expected, rows = split.whole(inputs), whole_model.rows_of(split.model)
    for output, found in split.front.run(inputs).items():
        name = output.removesuffix("_out")
        if name not in whole_model.FEATURES or whole_model.FEATURES[name]["table"] not in "abde":
            np.testing.assert_allclose(found, expected[output], rtol=1e-6, atol=1e-6, err_msg=name)
        else:
            magnitude = whole_model.look_up(name, np.abs(rows[name]), inputs)[1]
            assert (np.abs(found - expected[output]) <= 1e-6 * magnitude).all(), name


def test_ids_outside_of_a_split_table_are_for_the_front_to_refuse(split: Exported) -> None:
    inputs = whole_model.draw(np.random.default_rng(1), 3, 2)
    inputs["one"] = np.array([1, 40, 2])
    with pytest.raises(OutsideError, match="one"):
        split.front.run(inputs)
    del split.front.split["one"]
    try:
        found = split.front.activations(inputs)["one"]
    finally:
        split.front = Front(split.folder / "s")
    assert found[[0, 2]].all()
    assert not found[1].any(), "shards take it as zeros"


def test_the_front_has_no_table_and_says_what_the_whole_model_takes(
    ids: Exported, split: Exported, named: Exported
) -> None:
    for exported in (ids, split, named):
        whole, front = manifests(exported)
        assert front.front == whole.signatures["serving_default"]
        assert front.signatures == {"from_activations": whole.signatures["from_activations"]}
        assert (front.from_activations, front.padding) == (whole.from_activations, whole.padding)
        assert (front.tables, front.stacks, front.names) == ((), (), ())
        version = exported.folder / "s" / "front" / "1"
        data = sum(file.stat().st_size for file in version.glob("variables/variables.data*"))
        dense = sum(4 * int(np.prod(weight.shape)) for layer in exported.model.layers for weight in layer.weights)
        tables = sum(4 * int(np.prod(rows.shape)) for rows in all_tables(exported.model))
        assert data < dense - tables + 5000, "beside the dense weights there is the object graph"
        loaded = tf.saved_model.load(str(version))
        assert list(loaded.signatures) == ["from_activations"]
        assert yaml.safe_load((version.parents[1] / "shards.yaml").read_text())["front"] == "front"


def all_tables(model: Any) -> list[Array]:
    layers = [layer for layer in model.layers if isinstance(layer, TPUEmbedding)]
    return [np.asarray(rows) for layer in layers for rows in layer.embedding_tables.values()]


def test_the_c_api_loads_the_front_and_the_shards(ids: Exported) -> None:
    inputs = whole_model.draw(np.random.default_rng(8), 4, 3)
    activations = ids.front.activations(inputs)
    given = {**activations, "price": inputs["price"]}
    found = capi.predict(ids.folder / "s" / "front" / "1", given, "from_activations")
    np.testing.assert_array_equal(found["score"], ids.whole(inputs)["score"])


def test_an_older_server_refuses_a_front_and_its_shards_file(ids: Exported) -> None:
    front, *shards = (
        json.loads((ids.folder / "s" / name / "1" / MANIFEST_PATH).read_text())["format"]
        for name in ("front", "shard-0", "shard-1", "shard-2")
    )
    assert (front, shards) == (6, [1, 1, 1])
    assert yaml.safe_load((ids.folder / "s" / "shards.yaml").read_text())["format"] == 2


@pytest.mark.skipif(bool(available()), reason=f"the C library of native lookups: {available()}")
def test_the_c_library_looks_up_for_shards_as_for_the_whole_model(split: Exported) -> None:
    inputs = whole_model.draw(np.random.default_rng(9), 5, 4)
    expected = native(split.version)(inputs)
    found = Front(split.folder / "s", is_native=True).activations(inputs)
    assert found.keys() == expected.keys()
    for name, rows in whole_model.rows_of(split.model).items():
        if name in split.front.split:
            magnitude = whole_model.look_up(name, rows, inputs)[1]
            assert (np.abs(found[name] - expected[name]) <= 1e-6 * magnitude).all(), name
        else:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


# ---- a small model, exported again and again


class Scores(keras.layers.Layer):
    """Scores all rows of a table."""

    def __init__(self, layer: Any, config: Any) -> None:
        super().__init__()
        self.layer, self.config = layer, config

    def call(self, query: Any) -> Any:
        return tf.matmul(query, self.layer.embedding_tables[self.config], transpose_b=True)

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0], self.config.vocabulary_size)


def small_model(feature: str = "y", policy: str = "error", *, reads_ids: bool = False, reads_table: bool = True) -> Any:
    """Return a model that looks up in two tables, and reads one of them whole."""
    items, users = TableConfig(20, 3, "items"), TableConfig(30, 3, "users")
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("x", "y")}
    configs = {"x": FeatureConfig(items), feature: FeatureConfig(users, out_of_vocabulary=policy)}
    layer = TPUEmbedding(configs, optimizer="sgd")
    found = layer({"x": inputs["x"], feature: inputs["y"]})
    query = keras.layers.Dense(3, name="query")(keras.ops.concatenate(list(found.values()), -1))
    if reads_ids:
        query = query + keras.ops.cast(inputs["x"], "float32")[:, None]
    return keras.Model(inputs, {"scores": Scores(layer, items)(query) if reads_table else query})


class Small:
    """Two checkpoints of the small model, the first exported as shards."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoints = folder, []
        for seed in (1, 2):
            keras.utils.set_random_seed(seed)
            self.checkpoints.append(tf.train.Checkpoint(model=small_model()).write(str(folder / f"ckpt-{seed}")))
        export_shards(self.checkpoints[0], folder / "s", model=small_model, shards=2)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("small"))


def test_new_weights_keep_the_placement_and_an_interrupted_export_goes_on(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def until_the_front(opened: Any, request: Any, folder: Path, *given: Any, **more: Any) -> Any:
        if folder.name == "front" and "front" not in written:
            written.append("front")
            raise KeyboardInterrupt
        written.append(folder.name)
        return run_export(opened, request, folder, *given, **more)

    monkeypatch.setattr(sharding, "run_export", until_the_front)
    before = (small.folder / "s" / "shards.yaml").read_text()
    with pytest.raises(KeyboardInterrupt):
        export_shards(small.checkpoints[1], small.folder / "s", model=small_model)
    assert written == ["shard-0", "shard-1", "front"], "the front is last"
    assert not (small.folder / "s" / "front" / "2").exists()
    report = export_shards(small.checkpoints[1], small.folder / "s", model=small_model)
    assert (report.version, list(report.reports)) == (2, ["front"])
    assert (small.folder / "s" / "shards.yaml").read_text() == before
    assert report.front is not None
    assert report.front.tables == ("items",)
    manifest = Manifest.read(small.folder / "s" / "front" / "2")
    assert manifest is not None
    assert [table.name for table in manifest.tables] == ["items"], "the table that it reads whole"
    inputs = {"x": np.array([1, 19]), "y": np.array([0, 29])}
    expected = load(export_saved_model(small.checkpoints[1], small.folder / "whole", model=small_model).path)(inputs)
    np.testing.assert_array_equal(Front(small.folder / "s", 2).run(inputs)["scores"], expected["scores"])


@pytest.mark.parametrize("layout", ["mmap", "variables"])
def test_a_front_without_tables_is_rolled_back(small: Small, tmp_path: Path, layout: str) -> None:
    for checkpoint in small.checkpoints:
        export_shards(
            checkpoint,
            tmp_path / "s",
            model=lambda: small_model(reads_table=False),
            shards=2,
            layout=layout,
            allow_unused_weights=True,
        )
    for name in ("shard-0", "shard-1", "front"):
        assert rollback_version(tmp_path / "s" / name).version == 3
    inputs = {"x": np.array([1, 19]), "y": np.array([0, 29])}
    before, after, other = (Front(tmp_path / "s", version).run(inputs)["scores"] for version in (1, 3, 2))
    np.testing.assert_array_equal(after, before)
    assert not np.array_equal(before, other)


def test_other_features_need_another_folder(small: Small) -> None:
    for build in (lambda: small_model("z"), None):
        with refused(ConfigError):
            plan_shards(small.checkpoints[0], small.folder / "s", model=build)
    for more in ({"split": {"users": 2}}, {"shards": 3}):
        with refused(ConfigError):
            plan_shards(small.checkpoints[0], small.folder / "s", model=small_model, **more)


def test_a_model_that_needs_its_ids_is_refused(small: Small, tmp_path: Path) -> None:
    with refused(ExportError):
        export_shards(small.checkpoints[0], tmp_path / "s", model=lambda: small_model(reads_ids=True), shards=2)
    assert not (tmp_path / "s").exists()


def test_a_plan_says_what_the_front_has(small: Small, tmp_path: Path) -> None:
    plan = plan_shards(small.checkpoints[0], tmp_path / "s", model=small_model, shards=3, split={"users": 3})
    assert plan.to_dict()["front"] == {"name": "front", "features": ("x", "y"), "tables": ("items",), "bytes": 240}
    assert plan.describe().splitlines()[-1] == "  front: 240 B, 2 activations, tables items"
    assert sorted(shard.rows["users"] for shard in plan.shards) == [(0, 10), (10, 20), (20, 30)]
    assert plan.split["y"] == SplitFeature("users", 30, "error", "id", 0, drops_negative=False, weighted=False)
    assert not (tmp_path / "s").exists()


def test_only_whole_models_have_options_of_models(small: Small, tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{"output_names": {"a": "b"}}, {"allow_unused_weights": True}]
    for each in options:
        with refused(ConfigError):
            plan_shards(small.checkpoints[0], tmp_path / "s", shards=1, **each)
