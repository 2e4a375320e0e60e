"""`recall` and `describe` of retrieval exports, against numpy."""

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.export.retrieval import user_tower
from tests.support.serving.process import run_command
from tpuembed import export_retrieval
from tpuembed.checkpoint.tools import verify_files
from tpuembed.errors import ConfigError
from tpuembed.manifest import Manifest
from tpuembed.retrieval.recall import measure_recall

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("exports_in_this_process")]

USERS, FILMS, DIM, K = 300, 6000, 5, 10
NAMES = [b"film \xc3\xa9 %d" % number for number in range(FILMS)]


def query() -> keras.Model:
    return user_tower(USERS, DIM)


class Exports:
    def __init__(self, folder: Path) -> None:
        random = np.random.default_rng(5)
        model = query()
        self.users = random.standard_normal((USERS, DIM)).astype(np.float32)
        self.films = random.standard_normal((FILMS, DIM)).astype(np.float32)
        next(iter(model.layers[1].embedding_tables.values())).assign(self.users)
        self.prefix = tf.train.Checkpoint(model=model).write(str(folder / "ckpt"))
        order = np.argsort(-(self.users.astype(np.float64) @ self.films.T), axis=1, kind="stable")
        self.best = order[:, :K]

    def export(self, model_dir: Path, **options: Any) -> Path:
        done = export_retrieval(
            self.prefix, model_dir, query=query, candidates=self.films, k=K, index="ivf", min_recall=0.5, **options
        )
        return done.path

    def recall_of_answers(self, version: Path, names: bool) -> float:
        ids = capi.predict(version, {"user": np.arange(USERS)})["ids"]
        numbers = [[NAMES.index(one) if names else one for one in row] for row in ids.tolist()]
        return float(
            np.mean([len(set(got) & set(want)) / K for got, want in zip(numbers, self.best.tolist(), strict=True)])
        )


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    return Exports(tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize(("layout", "names"), [("variables", False), ("mmap", True)])
def test_the_measured_recall_is_that_of_the_answers(exports: Exports, tmp_path: Path, layout: str, names: bool) -> None:
    version = exports.export(tmp_path / "m", layout=layout, ids=NAMES if names else None)
    np.savez(tmp_path / "users.npz", user=np.arange(USERS, dtype=np.int32))
    found = measure_recall(version, queries=tmp_path / "users.npz").retrieval
    assert found.nprobe < found.partitions == found.recall[-1][0]
    assert found.recall[-1][1] == 1
    assert dict(found.recall)[found.nprobe] == pytest.approx(exports.recall_of_answers(version, names), abs=1e-9)
    arguments: list[str | Path] = [
        "recall",
        tmp_path / "m",
        "--queries",
        tmp_path / "users.npz",
        "--min-recall",
        "0.9",
        "--json",
    ]
    report = json.loads(run_command(*arguments).stdout)
    assert report["changed"]
    searched = report["retrieval"]["nprobe"]
    recalls = dict(report["retrieval"]["recall"])
    assert recalls[searched] >= 0.9
    assert recalls[searched] == pytest.approx(exports.recall_of_answers(version, names), abs=1e-9)
    manifest = Manifest.read(version)
    assert manifest is not None
    assert manifest.retrieval is not None
    assert (manifest.retrieval.nprobe, manifest.retrieval.min_recall) == (searched, 0.9)
    assert not verify_files(version).damaged
    described = run_command("describe", version).stdout
    assert f"{recalls[searched]:.4f}" in described


def test_every_loader_takes_a_version_whose_searches_read_more(exports: Exports, tmp_path: Path) -> None:
    """`tf.saved_model.load` refuses a graph whose shapes are those of another number of partitions."""
    version = exports.export(tmp_path / "m")
    found = measure_recall(version, min_recall=1.0, queries=np.arange(USERS))
    assert found.changed
    loaded = tf.saved_model.load(str(version)).signatures
    users = tf.range(USERS, dtype=tf.int64)
    np.testing.assert_array_equal(loaded["serving_default"](user=users)["ids"], exports.best)
    more = {"exclude": exports.best[:, :3], "require_tags": np.zeros(USERS, np.uint64)}
    given = loaded["filtered"](user=users, **{name: tf.constant(array) for name, array in more.items()})
    np.testing.assert_array_equal(given["ids"][:, : K - 3], exports.best[:, 3:])
    assert not measure_recall(version, min_recall=1.0, queries=np.arange(USERS)).changed


def test_what_has_no_recall_is_refused(exports: Exports, tmp_path: Path) -> None:
    exact = export_retrieval(exports.prefix, tmp_path / "m", query=query, candidates="table:users", k=3).path
    with pytest.raises(ConfigError, match="its index is exact"):
        measure_recall(exact)
    with pytest.raises(ConfigError, match="not an export"):
        measure_recall(exports.prefix)
    version = exports.export(tmp_path / "ivf")
    with pytest.raises(ConfigError, match=r"takes 'user', which is not among 'usr'|not among usr"):
        measure_recall(version, queries={"usr": [1]})
    with pytest.raises(ConfigError, match="at most 1"):
        measure_recall(version, min_recall=2)
    with pytest.raises(ConfigError, match="cannot answer them"):
        measure_recall(version, queries=np.array([USERS]))
