"""Of every signature of every kind of export it is proven that requests may share runs; and they give what each gives alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed_serving.settings import BatchingSettings
from tpuembed_serving.tensorflow import session as runtime

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

SIZES = {"a": (40, 4), "b": (30, 8)}
PLAIN = {
    "one": {"table": "a", "input": "id"},
    "other": {"table": "b", "input": "id", "out_of_vocabulary": "zeros"},
    "third": {"table": "a", "input": "id", "out_of_vocabulary": 3},
    "list": {"table": "a", "combiner": "mean"},
    "second_list": {"table": "a", "combiner": "mean"},
    "sums": {"table": "b", "combiner": "sum", "out_of_vocabulary": "zeros"},
    "sequence": {"table": "a", "max_sequence_length": 3},
}
WEIGHTED = {
    "weighted": {"table": "b", "weighted": True, "combiner": "sqrtn"},
    "second_weighted": {"table": "b", "weighted": True, "combiner": "sqrtn"},
}


def tables() -> dict[str, TableConfig]:
    return {name: TableConfig(*size, name) for name, size in SIZES.items()}


def by_id() -> Any:
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in SIZES}
    config = {name: FeatureConfig(table) for name, table in tables().items()}
    return keras.Model(inputs, TPUEmbedding(config, optimizer="sgd")(inputs))


def whole() -> Any:
    """Every kind of input that a whole model may look up, and numbers and strings beside them."""
    inputs = {
        "ragged": keras.Input((None,), dtype="int64", ragged=True, name="ragged"),
        "sparse": keras.Input((None,), dtype="int64", sparse=True, name="sparse"),
        "one": keras.Input((), dtype="int32", name="one"),
        "two": keras.Input((2,), dtype="int64", name="two"),
    }
    config = {"ragged": "a", "sparse": "a", "one": "b", "two": "b"}
    made = tables()
    layer = TPUEmbedding({name: FeatureConfig(made[table]) for name, table in config.items()}, optimizer="sgd")
    found = layer(inputs)
    price = keras.Input((3,), name="price")
    word = keras.Input((), dtype="string", name="word")
    place = keras.layers.StringLookup(vocabulary=["x", "y"], name="places")(word)
    parts = [found["ragged"], found["sparse"], found["one"], keras.layers.Flatten()(found["two"]), price]
    hidden = keras.layers.Dense(8, activation="relu", name="hidden")(keras.ops.concatenate(parts, -1))
    score = keras.layers.Dense(1, name="score")(hidden) + keras.ops.cast(place, "float32")[:, None]
    return keras.Model(
        {**inputs, "price": price, "word": word},
        {"score": score, "lists": keras.layers.Identity(name="lists")(found["ragged"])},
    )


def integers() -> Any:
    """As `whole`, of integers alone: it has the signature `packed`."""
    inputs = {
        "ragged": keras.Input((None,), dtype="int64", ragged=True, name="ragged"),
        "sparse": keras.Input((None,), dtype="int64", sparse=True, name="sparse"),
        "one": keras.Input((), dtype="int32", name="one"),
    }
    config = {"ragged": "a", "sparse": "a", "one": "b"}
    made = tables()
    layer = TPUEmbedding({name: FeatureConfig(made[table]) for name, table in config.items()}, optimizer="sgd")
    found = layer(inputs)
    return keras.Model(
        inputs, {name: keras.layers.Identity(name=f"{name}_out")(value) for name, value in found.items()}
    )


def sequences() -> Any:
    inputs = {
        "ragged": keras.Input((None,), dtype="int64", ragged=True, name="ragged"),
        "sparse": keras.Input((None,), dtype="int64", sparse=True, name="sparse"),
    }
    table = tables()["a"]
    config = {name: FeatureConfig(table, max_sequence_length=3) for name in inputs}
    found = TPUEmbedding(config, optimizer="sgd")(inputs)
    return keras.Model(
        inputs, {name: keras.layers.Identity(name=f"{name}_out")(value) for name, value in found.items()}
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    keras.utils.set_random_seed(5)
    folder = tmp_path_factory.mktemp("proven")
    return str(tf.train.Checkpoint(model=by_id()).write(str(folder / "ckpt")))


def check_proven(version: Path, signatures: set[str]) -> Any:
    servable = runtime.load(version)
    assert {name for name, each in servable.signatures.items() if each.inputs} == signatures
    for name in signatures:
        merging = servable.merging(servable.signatures[name])
        assert merging is not None
        assert merging.is_proven, name
        assert BatchingSettings().covers(merging.is_proven)
    return servable


SIGNATURES = {"serving_default", "serving_examples", "packed", "from_activations"}


@pytest.mark.nightly
@pytest.mark.parametrize(("storage", "layout"), [("float32", "variables"), ("int8", "mmap")])
def test_lookups(checkpoint: str, storage: str, layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, (features, signatures) in enumerate(
        [
            (PLAIN, {"serving_default", "serving_examples", "packed"}),
            (PLAIN | WEIGHTED, {"serving_default", "serving_examples"}),
        ]
    ):
        config = {"features": features}
        path = export_saved_model(
            checkpoint, tmp_path / f"m{number}", serving_config=config, storage=storage, layout=layout
        ).path
        check_proven(path, signatures).close()
    assert "are not batched" not in caplog.text


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "layout"),
    [(by_id, "variables"), (integers, "mmap"), (sequences, "variables")],
)
def test_whole_models(checkpoint: str, model: Any, layout: str, tmp_path: Path) -> None:
    path = export_saved_model(checkpoint, tmp_path / "m", model=model, layout=layout).path
    check_proven(path, SIGNATURES).close()


def draw(rng: np.random.Generator, rows: int, width: int, long: int) -> dict[str, Any]:
    def ids(limit: int, *shape: int) -> Any:
        found = rng.integers(0, limit, (rows, *shape))
        return np.where(rng.random(found.shape) < 0.3, -1, found) if shape else found

    return {
        "ragged": ids(40, width),
        "sparse": ids(40, width),
        "one": ids(30).astype(np.int32),
        "two": np.maximum(ids(30, 2), 0),
        "price": rng.normal(size=(rows, 3)).astype(np.float32),
        "word": np.array(["x", "y", "z"], object)[rng.integers(0, 3, rows)],
        "examples": np.array([example(rng, int(rng.integers(0, long))) for _ in range(rows)], object),
    }


def example(rng: np.random.Generator, length: int) -> bytes:
    def integers(values: Any) -> Any:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=np.ravel(values).tolist()))

    features = {
        "ragged": integers(rng.integers(0, 40, length)),
        "sparse": integers(rng.integers(0, 40, length)),
        "one": integers(rng.integers(0, 30)),
        "two": integers(rng.integers(0, 30, 2)),
        "price": tf.train.Feature(float_list=tf.train.FloatList(value=rng.normal(size=3))),
        "word": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"y"])),
    }
    return bytes(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def differences(servable: Any, name: str, requests: Sequence[Mapping[str, Any]]) -> float:
    """The largest difference between a run of all and runs of each, by an output's largest number."""
    signature = servable.signatures[name]
    inputs = [[each[info.alias] for info in signature.inputs] for each in requests]
    merged = servable.run(signature, [np.concatenate(parts) for parts in zip(*inputs, strict=True)])
    start, largest = 0, 0.0
    for own in inputs:
        stop = start + len(own[0])
        for found, want in zip(merged, servable.run(signature, own), strict=True):
            assert found[start:stop].shape == want.shape
            largest = max(largest, float(np.abs(found[start:stop] - want).max() / max(np.abs(want).max(), 1e-30)))
        start = stop
    return largest


@pytest.mark.nightly
def test_a_whole_model_answers_many_as_each(tmp_path: Path) -> None:
    keras.utils.set_random_seed(6)
    checkpoint = tf.train.Checkpoint(model=whole()).write(str(tmp_path / "ckpt"))
    path = export_saved_model(checkpoint, tmp_path / "m", model=whole).path
    servable = check_proven(path, {"serving_default", "serving_examples", "from_activations"})
    rng = np.random.default_rng(0)
    for _ in range(10):
        requests = [draw(rng, int(rng.integers(1, 4)), 3, int(rng.integers(1, 6))) for _ in range(4)]
        for name in ("serving_default", "serving_examples"):
            assert differences(servable, name, requests) < 1e-5
    servable.close()


@pytest.mark.nightly
def test_lookups_answer_many_as_each_bit_for_bit(checkpoint: str, tmp_path: Path) -> None:
    """Also from examples, whose lists are padded to the widest of a run."""
    names = {"ragged": PLAIN["list"], "sparse": PLAIN["sums"], "one": PLAIN["one"], "two": PLAIN["sequence"]}
    path = export_saved_model(checkpoint, tmp_path / "m", serving_config={"features": names}).path
    servable = check_proven(path, {"serving_default", "serving_examples", "packed"})
    rng = np.random.default_rng(1)
    for _ in range(10):
        requests = [draw(rng, int(rng.integers(1, 4)), 3, int(rng.integers(1, 6))) for _ in range(4)]
        for each in requests:
            each["one"] = each["one"].astype(np.int64)
        for name in ("serving_default", "serving_examples"):
            assert differences(servable, name, requests) == 0.0
    servable.close()
