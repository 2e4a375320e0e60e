"""Lookups of tables whose rows are split among servers: the answers of the parts add up to those of the whole table."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoint.partitioned import partitioned
from tests.support.export.fronts import Front, load
from tests.support.export.in_process import exports_in_this_process
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, Vocabulary, export_saved_model, export_shards
from tpuembed.errors import ConfigError, ExportError
from tpuembed.export.run import run_export
from tpuembed.export.sharding import export as sharding
from tpuembed.export.sharding.export import plan_shards

pytestmark = pytest.mark.nightly

Array = np.ndarray[Any, Any]
SIZES = {"a": (50, 4), "b": (23, 8), "c": (300, 4)}
SPLIT = {"a": 3, "b": 2}
COMBINERS, POLICIES = ("sum", "mean", "sqrtn"), ("error", "zeros", 7)


@pytest.fixture(scope="module", autouse=True)
def exports_here() -> Iterator[None]:
    with exports_in_this_process():
        yield


def some_features(random: np.random.Generator) -> dict[str, dict[str, Any]]:
    """Return features of all kinds, with random tables, combiners and policies."""
    found = {}
    for number in range(14):
        spec: dict[str, Any] = {"table": "abc"[random.integers(3)], "out_of_vocabulary": POLICIES[random.integers(3)]}
        kind = ("id", "list", "weighted", "sequence")[number % 4]
        spec["combiner"] = COMBINERS[random.integers(3)]
        more: dict[str, dict[str, Any]] = {
            "id": {"input": "id"},
            "list": {},
            "weighted": {"weighted": True},
            "sequence": {"max_sequence_length": int(random.integers(1, 5))},
        }
        spec |= more[kind]
        found[f"{kind}_{number}"] = spec
    return found


def draw(random: np.random.Generator, features: dict[str, dict[str, Any]], batch: int, hot: int) -> dict[str, Array]:
    """Return inputs with ids outside of the tables where the policy allows them, and padding anywhere in a list."""
    inputs: dict[str, Array] = {}
    for name, spec in features.items():
        rows, shape = SIZES[spec["table"]][0], (batch,) if spec.get("input") == "id" else (batch, hot)
        ids = random.integers(0, rows, shape)
        if spec["out_of_vocabulary"] != "error":
            ids = np.where(random.random(shape) < 0.2, random.choice([rows, rows + 5, -2, 2**40], shape), ids)
        if spec.get("input") != "id":
            ids = np.where(random.random(shape) < 0.3, -1, ids)
        if (length := spec.get("max_sequence_length", 0)) and spec["out_of_vocabulary"] == "error":
            ids[:, length:] = rows  # they are not looked up
        if spec.get("weighted"):
            inputs[f"{name}_weights"] = (random.random(shape) * 3).astype(np.float32)
        inputs[name] = ids
    return inputs


def look_up(name: str, spec: dict[str, Any], table: Array, inputs: dict[str, Array]) -> tuple[Array, Array]:
    """Return the float64 activation of a feature, and the sum of |weight x value|, divided alike."""
    ids, policy = inputs[name], spec["out_of_vocabulary"]
    inside = (ids >= 0) & (ids < len(table))
    found = table.astype(np.float64)[np.where(inside, ids, policy if isinstance(policy, int) else 0)]
    if policy == "zeros":
        found = np.where(inside[..., None], found, 0)
    if spec.get("input") == "id":
        return found, np.abs(found)
    present = ids != -1
    found = np.where(present[..., None], found, 0)
    if length := spec.get("max_sequence_length"):
        found = np.concatenate([found, np.zeros((len(ids), length, table.shape[1]))], 1)[:, :length]
        return found, np.abs(found)
    weights = np.where(present, inputs.get(f"{name}_weights", np.float32(1)), 0).astype(np.float64)
    divisor = {"sum": np.ones(len(ids)), "mean": weights.sum(1), "sqrtn": np.sqrt((weights**2).sum(1))}
    by = np.where(divisor[spec["combiner"]] == 0, 1, divisor[spec["combiner"]])[:, None]
    products = found * weights[..., None]
    return products.sum(1) / by, np.abs(products).sum(1) / by


class Split:
    """A checkpoint, and exports of random features of it: for one server, and with tables split."""

    def __init__(self, folder: Path, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.features = some_features(random)
        self.tables = {name: random.normal(size=shape).astype(np.float32) for name, shape in SIZES.items()}
        checkpoint = tf.train.Checkpoint(**{name: tf.Variable(rows) for name, rows in self.tables.items()})
        self.checkpoint, self.folder = checkpoint.write(str(folder / "ckpt")), folder / "s"
        self.config = {"features": self.features}
        layout = ("mmap", "variables")[seed % 2]
        options: dict[str, Any] = {"serving_config": self.config, "layout": layout}
        self.whole = load(export_saved_model(self.checkpoint, folder / "whole", **options).path)
        self.report = export_shards(self.checkpoint, self.folder, shards=3, split=SPLIT, **options)
        self.front = Front(self.folder)


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.nightly)])
def split(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Split:
    return Split(tmp_path_factory.mktemp("split"), request.param)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(seed=st.integers(0, 2**32), batch=st.integers(0, 6), hot=st.sampled_from([0, 1, 2, 5, 30]))
@pytest.mark.sampled(1)
def test_answers_of_parts_add_up(split: Split, seed: int, batch: int, hot: int) -> None:
    inputs = draw(np.random.default_rng(seed), split.features, batch, hot)
    found = split.front.activations(inputs)
    expected = split.whole(inputs)
    assert found.keys() == expected.keys() == split.features.keys()
    for name, spec in split.features.items():
        rows, magnitude = look_up(name, spec, split.tables[spec["table"]], inputs)
        most = 1e-6 * magnitude + 1e-12
        assert (np.abs(found[name] - rows) <= most).all(), name
        assert (np.abs(found[name] - expected[name]) <= most).all(), name


def test_shards_have_the_rows_that_the_file_says(split: Split) -> None:
    parts: dict[str, list[tuple[int, int]]] = {}
    for shard in split.front.content["shards"]:
        assert set(shard.get("rows", {})) <= set(shard["tables"])
        for name, (start, stop) in shard.get("rows", {}).items():
            parts.setdefault(name, []).append((start, stop))
    assert {name: sorted(rows) for name, rows in parts.items()} == {
        "a": [(0, 16), (16, 33), (33, 50)],
        "b": [(0, 11), (11, 23)],
    }
    of_split = {name: spec for name, spec in split.features.items() if spec["table"] in SPLIT}
    assert split.front.split.keys() == of_split.keys()
    for name, spec in of_split.items():
        assert split.front.split[name] == {
            "table": spec["table"],
            "rows": SIZES[spec["table"]][0],
            "out_of_vocabulary": spec["out_of_vocabulary"],
            "input": spec.get("input", "ids"),
            "max_sequence_length": spec.get("max_sequence_length", 0),
            "drops_negative": False,
            "weighted": spec.get("weighted", False),
        }
    assert split.front.content["format"] == 2


def test_a_folder_of_versions_takes_no_shards(split: Split, tmp_path: Path) -> None:
    for number in (2, 11):
        (tmp_path / "m" / str(number)).mkdir(parents=True)
    for export in (plan_shards, export_shards):
        with refused(ConfigError):
            export(split.checkpoint, tmp_path / "m", serving_config=split.config, shards=2)
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["11", "2"]


def test_a_later_export_keeps_the_parts(split: Split, tmp_path: Path) -> None:
    options: dict[str, Any] = {"serving_config": split.config}
    plan = plan_shards(split.checkpoint, split.folder, **options)
    assert plan.shards == split.report.shards
    changed = {**split.features, "id_0": {**split.features["id_0"], "table": "a", "out_of_vocabulary": 3}}
    one_less = {name: spec for name, spec in split.features.items() if name != "list_5"}
    wrong: list[dict[str, Any]] = [
        {"serving_config": {"features": changed}},
        {"serving_config": {"features": one_less}},
        {**options, "split": {"a": 3}},
        {**options, "split": {"a": 3, "b": 3}},
        {**options, "shards": 2},
    ]
    for each in wrong:
        with refused(ConfigError):
            plan_shards(split.checkpoint, split.folder, **each)
    larger = {name: np.concatenate([rows, rows]) for name, rows in split.tables.items()}
    grown = tf.train.Checkpoint(**{name: tf.Variable(rows) for name, rows in larger.items()}).write(
        str(tmp_path / "ckpt")
    )
    with refused(ConfigError):
        plan_shards(grown, split.folder, **options)


def test_rows_of_a_table_with_names_stay_together(tmp_path: Path) -> None:
    table = TableConfig(20, 4, "users")
    layer = TPUEmbedding(FeatureConfig(table, name="user", vocabulary=Vocabulary([*"abc"])), optimizer="sgd")
    checkpoint = tf.train.Checkpoint(layer=layer).write(str(tmp_path / "ckpt"))
    for options in ({"shards": 2, "split": {"users": 2}}, {"shard_bytes": 100}):
        with refused(ConfigError):
            plan_shards(checkpoint, tmp_path / "s", **options)
    rows = {"features": {"user": {"table": "users", "takes_rows": True}}}
    plan = plan_shards(checkpoint, tmp_path / "s", serving_config=rows, shards=2, split={"users": 2})
    assert [shard.rows for shard in plan.shards] == [{"users": (0, 10)}, {"users": (10, 20)}]


def test_an_export_of_another_placement_is_no_part_of_this_one(tmp_path: Path) -> None:
    """Shards of an interrupted export, whose folder has no shards.yaml yet, stay only if they have the rows of the plan."""
    checkpoint = tf.train.Checkpoint(a=tf.Variable(tf.ones([6, 2]))).write(str(tmp_path / "ckpt"))
    options: dict[str, Any] = {"serving_config": {"features": {"x": {"table": "a", "input": "id"}}}}
    export_shards(checkpoint, tmp_path / "s", **options, shards=2, split={"a": 2})
    (tmp_path / "s" / "shards.yaml").unlink()
    shutil.rmtree(tmp_path / "s" / "shard-1")
    other = export_shards(checkpoint, tmp_path / "s", **options, shards=3, split={"a": 3})
    assert (other.version, list(other.reports)) == (2, ["shard-0", "shard-1", "shard-2"])


def test_a_placement_is_not_kept_if_its_shards_are_larger_than_asked_for(tmp_path: Path) -> None:
    checkpoint = tf.train.Checkpoint(a=tf.Variable(tf.ones([6, 2]))).write(str(tmp_path / "ckpt"))
    options: dict[str, Any] = {"serving_config": {"features": {"x": {"table": "a", "input": "id"}}}}
    export_shards(checkpoint, tmp_path / "s", **options, shard_bytes=24)
    export_shards(checkpoint, tmp_path / "s", **options, shard_bytes=24)
    with refused(ConfigError):
        export_shards(checkpoint, tmp_path / "s", **options, shard_bytes=16)


def test_an_unfinished_version_of_another_export_is_not_passed_over(tmp_path: Path) -> None:
    """Servers keep two versions: after a third one on a shard, no version was on all shards."""
    first, second = (
        tf.train.Checkpoint(a=tf.Variable(tf.fill([6, 2], float(one)))).write(str(tmp_path / f"ckpt{one}"))
        for one in range(2)
    )
    options: dict[str, Any] = {"serving_config": {"features": {"x": {"table": "a", "input": "id"}}}}
    for _ in range(2):
        export_shards(first, tmp_path / "s", **options, shards=2, split={"a": 2})
    shutil.rmtree(tmp_path / "s" / "shard-1" / "2")
    for number in (None, 7):
        with refused(ExportError):
            export_shards(second, tmp_path / "s", **options, version=number)
    shutil.rmtree(tmp_path / "s" / "shard-0" / "2")
    assert export_shards(second, tmp_path / "s", **options).version == 2


@contextlib.contextmanager
def interrupted_after_one_shard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The export inside must be ended by an interrupt before its second shard."""
    exported: list[str] = []

    def first_alone(opened: Any, request: Any, folder: Path, *given: Any, **more: Any) -> Any:
        if exported:
            raise KeyboardInterrupt
        exported.append(folder.name)
        return run_export(opened, request, folder, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(sharding, "run_export", first_alone)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_an_export_with_other_options_of_the_checkpoint_is_no_part_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of partitions decides which row is which."""
    checkpoint = partitioned(tmp_path, "0,4:-", "4,4:-", "8,3:-")
    options: dict[str, Any] = {"serving_config": {"features": {"x": {"table": "emb", "input": "id"}}}, "shards": 2}
    options["split"] = {"emb": 2}
    with interrupted_after_one_shard(monkeypatch):
        export_shards(checkpoint, tmp_path / "s", **options, checkpoint_options={"partition_strategy": "mod"})
    report = export_shards(checkpoint, tmp_path / "s", **options, checkpoint_options={"partition_strategy": "div"})
    assert (report.version, sorted(report.reports)) == (2, ["shard-0", "shard-1"])


def test_an_export_of_other_names_is_no_part_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of names may be corrected between an interrupted export and its end."""
    tables = {name: tf.Variable(tf.reshape(tf.range(6.0), [6, 1])) for name in "ab"}
    checkpoint = tf.train.Checkpoint(**tables).write(str(tmp_path / "ckpt"))
    names = tmp_path / "names"
    vocabulary = {"file": str(names), "oov_buckets": 1}
    config = {"features": {name: {"table": name, "input": "id", "vocabulary": vocabulary} for name in "ab"}}
    names.write_text("ann\nbob\n")
    with interrupted_after_one_shard(monkeypatch):
        export_shards(checkpoint, tmp_path / "s", serving_config=config, shards=2)
    names.write_text("bob\nann\n")
    report = export_shards(checkpoint, tmp_path / "s", serving_config=config, shards=2)
    assert (report.version, sorted(report.reports)) == (2, ["shard-0", "shard-1"])


@pytest.mark.parametrize(("before", "now"), [("id", "ids"), ("ids", "id")])
def test_a_folder_keeps_its_padding(tmp_path: Path, before: str, now: str) -> None:
    """Servers fill up rows with the padding in shards.yaml, so an export with other padding needs a file of its own."""
    checkpoint = tf.train.Checkpoint(a=tf.Variable(tf.ones([6, 2]))).write(str(tmp_path / "ckpt"))
    feature = {"id": {"table": "a", "input": "id"}, "ids": {"table": "a", "combiner": "sum"}}
    export_shards(checkpoint, tmp_path / "s", serving_config={"features": {"x": feature[before]}}, shards=1)
    with refused(ConfigError):
        export_shards(checkpoint, tmp_path / "s", serving_config={"features": {"x": feature[now]}}, shards=1)
