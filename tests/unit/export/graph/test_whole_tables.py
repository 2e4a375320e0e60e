"""A model that scores against all rows of a table: the export reads the stored variable, and answers what training does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import capi
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.errors import ConfigError, ExportError
from tpuembed.manifest import Manifest
from tpuembed_serving.tensorflow import session as runtime

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

IDS = np.array([0, 6, 3])


class Scores(keras.layers.Layer):
    """Products of queries with all rows of a table of the layer that it is given."""

    def __init__(self, embedding: Any, config: Any, **options: Any) -> None:
        super().__init__(**options)
        self.embedding, self.config = embedding, config

    def call(self, query: Any) -> Any:
        return tf.matmul(query, self.embedding.embedding_tables[self.config], transpose_b=True)

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0], self.config.vocabulary_size)


CONFIGS = {
    "items": TableConfig(7, 4, "items"),
    "users": TableConfig(9, 4, "users"),
    "other": TableConfig(5, 2, "other"),
}


def functional(whole: tuple[str, ...] = ("items",), optimizer: Any = "sgd") -> Any:
    """Lookups in three tables, two of one width, and scores of `whole` by the users' rows."""
    configs = {name: TableConfig(c.vocabulary_size, c.dim, name) for name, c in CONFIGS.items()}
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in configs}
    embedding = TPUEmbedding({name: FeatureConfig(config) for name, config in configs.items()}, optimizer=optimizer)
    rows = embedding(inputs)
    outputs = {f"{name}_rows": value for name, value in rows.items()}
    for name in whole:
        outputs[f"{name}_scores"] = Scores(embedding, configs[name], name=f"{name}_scorer")(
            rows["users" if configs[name].dim == 4 else "other"]
        )
    return keras.Model(inputs, outputs)


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="retrieval")
        self.config = TableConfig(7, 4, "items")
        self.embedding = TPUEmbedding(FeatureConfig(self.config), optimizer="sgd")

    def call(self, ids: Any) -> Any:
        table = self.embedding.embedding_tables[self.config]
        query = self.embedding(ids)
        return {
            "scores": query @ tf.transpose(table),
            "ops": keras.ops.matmul(query, keras.ops.transpose(table)),
            "best": tf.nn.embedding_lookup(table, tf.argmax(tf.matmul(query, table, transpose_b=True), 1)),
            "norms": tf.reduce_sum(table * table, 1)[None] + 0 * query[:, :1],
            "first": table[:1] + 0 * query,
        }


def subclassed() -> Any:
    return Subclassed(), tf.TensorSpec([None], tf.int64, name="item")


def trained(model: Any) -> Any:
    for weight in model.weights:
        if weight.dtype == "float32":
            weight.assign(np.random.default_rng(len(weight.path)).normal(size=weight.shape))
    return model


def served(path: Path, inputs: dict[str, Any], signature: str = "serving_default") -> dict[str, Any]:
    servable = runtime.load(path)
    try:
        called = servable.signatures[signature]
        values = servable.run(called, [inputs[info.alias] for info in called.inputs])
        return {info.alias: value for info, value in zip(called.outputs, values, strict=True)}
    finally:
        servable.close()


def check(path: Path, inputs: dict[str, Any], truth: dict[str, Any], through_c: bool = False) -> None:
    loaded = tf.saved_model.load(str(path))  # kept: a mapped table goes with it
    python = loaded.signatures["serving_default"](**{name: tf.constant(value) for name, value in inputs.items()})
    for found in (served(path, inputs), python, *([capi.predict(path, inputs)] if through_c else [])):
        assert found.keys() == truth.keys()
        for name, values in truth.items():
            np.testing.assert_allclose(found[name], values, atol=1e-5, err_msg=name)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("whole", "layout"),
    [(("items",), "variables"), (("items", "users"), "mmap"), (("other",), "mmap"), ((), "variables")],
)
def test_numbers_of_both_exporters_in_every_reader(whole: tuple[str, ...], layout: str, tmp_path: Path) -> None:
    model = trained(functional(whole))
    inputs = {"items": IDS, "users": np.array([8, 1, 8]), "other": np.array([4, 0, 2])}
    truth = model({name: tf.constant(value) for name, value in inputs.items()}, training=False)
    checkpoint = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    saved = export_saved_model(checkpoint, tmp_path / "a", model=lambda: functional(whole), layout=layout)
    live = export_saved_model(model, tmp_path / "b", layout=layout)
    for report in (saved, live):
        check(report.path, inputs, truth, through_c=report is saved and len(whole) == 2)
        manifest = Manifest.read(report.path)
        assert manifest is not None
        stacks = {table.name: table.stack for table in manifest.tables}
        for name in whole:
            assert [table for table, stack in stacks.items() if stack == stacks[name]] == [name]


@pytest.mark.nightly
def test_a_subclassed_model(tmp_path: Path) -> None:
    model, spec = subclassed()
    truth = trained_after(model)(tf.constant(IDS))
    checkpoint = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    for report in (
        export_saved_model(checkpoint, tmp_path / "a", model=subclassed),
        export_saved_model((model, spec), tmp_path / "b", layout="mmap"),
    ):
        check(report.path, {"item": IDS}, truth)
        assert (report.path / "assets.extra" / "tf_serving_warmup_requests").is_file()


def trained_after(model: Any) -> Any:
    model(tf.constant(IDS))
    return trained(model)


class Decorated(keras.Model):
    """TensorFlow keeps what it has traced of this `call`."""

    def __init__(self, whole: bool) -> None:
        super().__init__(name="decorated")
        self.config, self.whole = TableConfig(7, 4, "items"), whole
        self.embedding = TPUEmbedding(FeatureConfig(self.config), optimizer="sgd")
        self.dense = keras.layers.Dense(4)
        self.dense.build((None, 4))  # Keras forgets what is assigned to weights that are made inside of a function

    @tf.function
    def call(self, ids: Any) -> Any:
        query = self.dense(self.embedding(ids))
        return query @ tf.transpose(self.embedding.embedding_tables[self.config]) if self.whole else query


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:no requests to warm up")  # the kept function does not take zeros for its tables
@pytest.mark.parametrize("whole", [True, False])
def test_a_call_that_is_a_function_itself(whole: bool, tmp_path: Path) -> None:
    model = Decorated(whole)
    truth = trained_after(model)(tf.constant(IDS))
    checkpoint = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    spec = tf.TensorSpec([None], tf.int64, name="id")
    report = export_saved_model(checkpoint, tmp_path / "m", model=lambda: (Decorated(whole), spec))
    check(report.path, {"id": IDS}, {"output_0": truth})


def test_a_model_of_a_fixed_batch(tmp_path: Path) -> None:
    def build() -> Any:
        x = keras.Input(batch_shape=(2,), dtype="int64", name="id")
        return keras.Model(x, TPUEmbedding(FeatureConfig(TableConfig(7, 4, "items")), optimizer="sgd")(x))

    model = build()
    checkpoint = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    for report in (
        export_saved_model(checkpoint, tmp_path / "a", model=build),
        export_saved_model(model, tmp_path / "b"),
    ):
        (found,) = served(report.path, {"id": IDS[:2]}).values()
        np.testing.assert_allclose(found, model(IDS[:2]))


def symbolic() -> Any:
    """A table that stands in the graph of a functional model itself."""
    config = TableConfig(7, 4, "items")
    x = keras.Input((), dtype="int64", name="item")
    embedding = TPUEmbedding(FeatureConfig(config), optimizer="sgd")
    table = embedding.embedding_tables[config]
    return keras.Model(x, {"scores": keras.ops.einsum("bd,nd->bn", embedding(x), table)})


def test_a_table_in_a_functional_models_graph(tmp_path: Path) -> None:
    model = trained(symbolic())
    truth = model(tf.constant(IDS), training=False)
    checkpoint = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    check(export_saved_model(checkpoint, tmp_path / "a", model=symbolic).path, {"item": IDS}, truth)
    with pytest.raises(ExportError, match=r"Read layer\.embedding_tables in the call of a layer"):
        export_saved_model(model, tmp_path / "b")  # the graph has the live variable, which is not exported


def read_while_built() -> Any:
    config = TableConfig(7, 4, "items")
    embedding = TPUEmbedding(FeatureConfig(config), optimizer="sgd")
    constant = tf.transpose(embedding.embedding_tables[config])
    x = keras.Input((), dtype="int64", name="item")
    return keras.Model(x, keras.ops.matmul(embedding(x), constant))


class Kept(keras.layers.Layer):
    """Has a function that TensorFlow keeps, whatever the batch: it would go on to read what it read at first."""

    def __init__(self, embedding: Any, config: Any, **options: Any) -> None:
        super().__init__(**options)
        self.embedding, self.config = embedding, config

    @tf.function(autograph=False)
    def norms(self) -> Any:
        return tf.reduce_sum(tf.square(self.embedding.embedding_tables[self.config]), 1)

    def call(self, query: Any) -> Any:
        return tf.reduce_sum(query, 1)[:, None] + self.norms()[None]


def kept() -> Any:
    config = TableConfig(7, 4, "items")
    x = keras.Input((), dtype="int64", name="item")
    embedding = TPUEmbedding(FeatureConfig(config), optimizer="sgd")
    return keras.Model(x, Kept(embedding, config)(embedding(x)))


@pytest.mark.parametrize(
    ("factory", "options", "error", "message"),
    [
        (
            functional,
            {"storage": "int8"},
            ConfigError,
            "the model reads the whole table, and storage int8 would be decoded",
        ),
        (functional, {"storage": {"*": "bfloat16"}}, ConfigError, "--storage 'items=float32'"),
        (read_while_built, {}, ExportError, "read table 'items' while it was being built"),
        (kept, {}, ExportError, "without a tf.function of its own"),
    ],
)
def test_what_cannot_be_read_whole_is_refused(
    factory: Any, options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    model = functional() if factory is functional else None
    if model is None:
        config = TableConfig(7, 4, "items")
        x = keras.Input((), dtype="int64", name="item")
        model = keras.Model(x, TPUEmbedding(FeatureConfig(config), optimizer="sgd")(x))
    checkpoint = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    with pytest.raises(error, match=message):
        export_saved_model(checkpoint, tmp_path / "m", model=factory, **options)
    assert not list(tmp_path.glob("m/[0-9]*"))


def test_other_tables_may_be_stored_small(tmp_path: Path) -> None:
    checkpoint = tf.train.Checkpoint(model=functional()).write(str(tmp_path / "ckpt"))
    report = export_saved_model(checkpoint, tmp_path / "m", model=functional, storage={"*": "int8", "items": "float32"})
    manifest = Manifest.read(report.path)
    assert manifest is not None
    assert {stack.storage for stack in manifest.stacks} == {"int8", "float32"}


ROWS, DIM = 400_000, 64  # 102 MB

_MEASURE = """
import json, os, sys
from pathlib import Path
import numpy as np
from tests.support.memory import resident_bytes
from tpuembed_serving.tensorflow import session as runtime
servable = runtime.load(Path(sys.argv[1]) / "small")
run = lambda one: one.run(one.signatures["serving_default"], [np.array([1, 2])])
run(servable)
before = resident_bytes(os.getpid(), "RssAnon"), resident_bytes(os.getpid())
large = runtime.load(Path(sys.argv[1]) / "large")
for _ in range(3):
    run(large)
after = resident_bytes(os.getpid(), "RssAnon"), resident_bytes(os.getpid())
print(json.dumps({"anon": after[0] - before[0], "peak": resident_bytes(os.getpid(), "VmHWM") - before[1]}))
"""


def large(rows: int) -> Any:
    """Looks up in a table and scores against all of it, beside another table of its width."""
    config, other = TableConfig(rows, DIM, "items", initializer="zeros"), TableConfig(1000, DIM, "others")
    x = keras.Input((), dtype="int64", name="item")
    embedding = TPUEmbedding([FeatureConfig(config), FeatureConfig(other)], optimizer="sgd")
    found = embedding([x, x])
    return keras.Model(x, {"best": Best(embedding, config)(found[0] + found[1])})


class Best(Scores):
    def call(self, query: Any) -> Any:
        return tf.reduce_max(super().call(query), 1)

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0],)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:no requests to warm up")  # a table that large is not tried with zeros
@pytest.mark.parametrize("layout", ["variables", "mmap"])
def test_no_copy_at_load_nor_per_request(layout: str, tmp_path: Path) -> None:
    for name, rows in (("small", 100), ("large", ROWS)):
        report = export_saved_model(large(rows), tmp_path / "m", layout=layout)
        report.path.rename(tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found, size = json.loads(done.stdout.splitlines()[-1]), 4 * ROWS * DIM
    # TensorFlow's graph optimizer and its threads take some 30 MB; a copy would be another `size`.
    assert found["anon"] < (1.6 if layout == "variables" else 0.6) * size, found
    assert found["peak"] < 1.7 * size, found
