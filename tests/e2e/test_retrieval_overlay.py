"""Overlays of retrieval exports: candidates that come, change and go, against a dictionary that numpy searches."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.export.retrieval import user_tower
from tests.support.messages import refused
from tpuembed import apply_package, compact_version, export_retrieval
from tpuembed.checkpoint.tools import verify_files
from tpuembed.errors import ExportError
from tpuembed.manifest import Manifest
from tpuembed.retrieval import measure_recall
from tpuembed.tensor_bundle import Bundle
from tpuembed_serving.tensorflow import session as runtime

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("exports_in_this_process")]

USERS, DIM, K = 40, 6, 15


def answer(server: Any, name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    signature = server.signatures[name]
    found = server.run(signature, [inputs[info.alias] for info in signature.inputs])
    return {info.alias: array for info, array in zip(signature.outputs, found, strict=True)}


def query() -> keras.Model:
    return user_tower(USERS, DIM)


class Life:
    """Candidates by id, each with a vector and tags; and a model whose users change too."""

    def __init__(self, folder: Path, names: bool, seed: int) -> None:
        self.random, self.names, self.folder = np.random.default_rng(seed), names, folder
        self.model = query()
        self.candidates: dict[Any, tuple[Any, int]] = {}
        self.next = 0
        self.come(4000)
        self.users = self.vectors(USERS)

    def vectors(self, count: int) -> Any:
        return self.random.standard_normal((count, DIM)).astype(np.float32)

    def come(self, count: int) -> None:
        for vector in self.vectors(count):
            self.next += 1
            name = b"film \xff%d" % self.next if self.names else self.next * 3 - 6000
            self.candidates[name] = vector, int(self.random.integers(4))

    def change(self) -> None:
        ids = list(self.candidates)
        for number in self.random.choice(len(ids), 100, replace=False):
            self.candidates[ids[number]] = self.vectors(1)[0] * 2, int(self.random.integers(4))
        for number in self.random.choice(len(ids), 100, replace=False):  # tags alone
            self.candidates[ids[number]] = self.candidates[ids[number]][0], int(self.random.integers(4))
        for number in self.random.choice(len(ids), 60, replace=False):
            del self.candidates[ids[number]]
        self.come(int(self.random.integers(80)))
        self.users[:5] = self.vectors(5)

    def export(self, model_dir: Path, **options: Any) -> Path:
        next(iter(self.model.layers[1].embedding_tables.values())).assign(self.users)
        prefix = tf.train.Checkpoint(model=self.model).write(str(self.folder / "ckpt"))
        order = self.random.permutation(len(self.candidates))
        ids = [list(self.candidates)[number] for number in order]
        vectors = np.stack([self.candidates[one][0] for one in ids])
        tags = [self.candidates[one][1] for one in ids]
        return export_retrieval(
            prefix, model_dir, query=query, candidates=vectors, ids=ids, tags=tags, k=K, **options
        ).path

    def check(self, version: Path, *, is_exact: bool) -> None:
        """Every search is right: its scores are those of its ids. If it is exact, no better one is missing."""
        manifest = Manifest.read(version)
        assert manifest is not None
        assert manifest.retrieval is not None
        index = manifest.retrieval.index  # partitions that have the best ones may not have those that a filter leaves
        ids = list(self.candidates)
        scores = self.users @ np.stack([self.candidates[one][0] for one in ids]).T
        tags = np.array([self.candidates[one][1] for one in ids])
        wanted = self.random.integers(0, 4, USERS).astype(np.uint64)
        exclude = [[ids[number] for number in np.argsort(-row)[:3]] for row in scores]
        out = np.array([np.isin(np.arange(len(ids)), np.argsort(-row)[:3]) for row in scores])
        passes = ((tags[None] & wanted[:, None].astype(int)) == wanted[:, None].astype(int)) & ~out
        users = {"user": np.arange(USERS)}
        filters = {"exclude": np.array(exclude, object if self.names else np.int64), "require_tags": wanted}
        self._compare(capi.predict(version, users), scores, ids, is_exact)
        found = capi.predict(version, users | filters, signature="filtered")
        self._compare(found, np.where(passes, scores, -np.inf), ids, is_exact and index == "exact")
        options = runtime.RunOptions(lookups="native")
        with contextlib.closing(runtime.load(version, options=options)) as server:  # by the C library, with layout mmap
            self._compare(answer(server, "serving_default", users), scores, ids, is_exact)
            found = answer(server, "filtered", users | filters)
            self._compare(found, np.where(passes, scores, -np.inf), ids, is_exact and index == "exact")

    def _compare(self, found: Any, scores: Any, ids: list[Any], is_exact: bool) -> None:
        number_of = {one: number for number, one in enumerate(ids)}
        numbers = np.array([[number_of[one] for one in row] for row in found["ids"].tolist()])
        assert all(len(set(row)) == K for row in numbers.tolist())
        got = np.take_along_axis(scores, numbers, 1)
        np.testing.assert_allclose(found["scores"], got, rtol=1e-4, atol=1e-5)
        if is_exact:
            np.testing.assert_allclose(found["scores"], -np.sort(-scores, 1)[:, :K], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("index", "layout", "names", "storage"),
    [
        ("exact", "mmap", False, "float32"),
        ("ivf", "variables", True, "float32"),
        ("ivf", "mmap", False, "bfloat16"),
    ],
)
def test_a_life_of_candidates(tmp_path: Path, index: str, layout: str, names: bool, storage: str) -> None:
    life, model_dir = Life(tmp_path, names, seed=len(index + layout)), tmp_path / "m"
    options: dict[str, Any] = {"index": index, "layout": layout}
    if storage != "float32":  # of numbers that it holds
        life.vectors = lambda count: life.random.integers(-100, 100, (count, DIM)).astype(np.float32)  # type: ignore[method-assign]
        life.candidates.clear()
        life.come(4000)
        options["storage"] = {"candidates": storage}
    life.check(life.export(model_dir, min_recall=1, **options), is_exact=True)
    for number in (2, 3):
        life.change()
        version = life.export(model_dir, base="latest", max_overlay=0.5, **options)
        manifest = Manifest.read(version)
        assert manifest is not None
        assert manifest.retrieval is not None
        assert manifest.base is not None
        assert (version.name, manifest.base.version) == (str(number), 1)
        assert manifest.retrieval.candidates == len(life.candidates)
        assert not verify_files(version).damaged
        life.check(version, is_exact=index == "exact")
    compacted = compact_version(model_dir).path
    assert not verify_files(compacted).damaged
    life.check(compacted, is_exact=index == "exact")
    if index == "ivf":
        for each in (version, compacted):
            recall = measure_recall(each, queries=np.arange(USERS), min_recall=1)
            assert recall.retrieval.candidates == len(life.candidates)
            life.check(each, is_exact=True)  # all the best of all users are found now
    life.change()
    later = life.export(model_dir, base="latest", max_overlay=0.5, **options)
    life.check(later, is_exact=index == "exact")


def test_a_package_has_the_changes(tmp_path: Path) -> None:
    life = Life(tmp_path, False, seed=3)
    life.export(tmp_path / "a", index="ivf", layout="mmap", min_recall=1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    life.change()
    package = life.export(tmp_path / "a", base="latest", layout="mmap", delta_to=tmp_path / "deltas")
    life.check(apply_package(package, tmp_path / "b").path, is_exact=False)


def test_too_many_changes_make_a_full_version_with_partitions_of_its_own(tmp_path: Path) -> None:
    life = Life(tmp_path, False, seed=4)
    life.export(tmp_path / "m", index="ivf", min_recall=1)
    life.come(1500)
    with pytest.warns(UserWarning, match="Writing a full version"):
        version = life.export(tmp_path / "m", index="ivf", base="latest", min_recall=1)
    manifest = Manifest.read(version)
    assert manifest is not None
    assert manifest.retrieval is not None
    assert manifest.base is None
    assert manifest.retrieval.partitions == 5
    life.check(version, is_exact=False)
    overlay: dict[str, Any] = {"base": "latest", "max_overlay": 9.0}
    for options, what in (
        ({"metric": "cosine"}, "metric is dot"),
        ({"min_recall": 0.5}, "min_recall is 1"),
        ({"index": "exact"}, "index is ivf"),
    ):
        with pytest.warns(UserWarning, match=f"its {what}.*, and that of the export is .*Writing a full version"):
            version = life.export(tmp_path / "m", **{"index": "ivf", "min_recall": 1, **overlay, **options})
        manifest = Manifest.read(version)
        assert manifest is not None
        assert manifest.base is None
        shutil.rmtree(version)
    with pytest.raises(ExportError, match="its metric is dot, and that of the export is cosine"):
        life.export(tmp_path / "m", index="ivf", metric="cosine", base="latest", delta_to=tmp_path / "deltas")


@pytest.mark.parametrize("layout", ["variables", "mmap"])
def test_a_damaged_index_is_not_compacted(tmp_path: Path, layout: str) -> None:
    life = Life(tmp_path, False, seed=5)
    life.export(tmp_path / "m", index="ivf", layout=layout)
    life.change()
    version = life.export(tmp_path / "m", index="ivf", layout=layout, base="latest", max_overlay=0.5)
    if layout == "mmap":
        place, start = version / "index" / "ids", 0
    else:
        with Bundle.open(version / "variables" / "variables") as bundle:
            (entry,) = [one for key, one in bundle.entries.items() if key.startswith("index/ids/")]
            place, start = Path(str(bundle.data_path(entry.shard))), entry.offset
    data = bytearray(place.read_bytes())
    data[start + 8] ^= 1
    place.unlink()
    place.write_bytes(data)
    with refused(ExportError):
        compact_version(tmp_path / "m")
    assert sorted(path.name for path in (tmp_path / "m").glob("[0-9]*")) == ["1", "2"]


@pytest.mark.parametrize("layout", ["variables", "mmap"])
def test_a_filter_leaves_as_many_as_pass(tmp_path: Path, layout: str) -> None:
    random, count = np.random.default_rng(7), 6000
    vectors = random.standard_normal((count, DIM)).astype(np.float32)
    tags = np.zeros(count, np.uint64)
    rare = {1: random.choice(count, 4, replace=False), 2: random.choice(count, 40, replace=False)}
    for bit, numbers in rare.items():
        tags[numbers] |= bit
    model = query()
    users = random.standard_normal((USERS, DIM)).astype(np.float32)
    next(iter(model.layers[1].embedding_tables.values())).assign(users)
    prefix = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    options: dict[str, Any] = {"query": query, "tags": tags, "k": K, "layout": layout, "index": "ivf"}
    version = export_retrieval(prefix, tmp_path / "m", candidates=vectors, min_recall=0.01, **options).path
    assert Manifest.read(version).retrieval.nprobe < Manifest.read(version).retrieval.partitions  # type: ignore[union-attr]
    wanted = np.arange(USERS, dtype=np.uint64) % 4
    scores = users @ vectors.T
    exclude = np.argsort(-np.where(tags[None] & 2, scores, -np.inf), 1)[:, :2]
    passes = (tags[None] & wanted[:, None]) == wanted[:, None]
    np.put_along_axis(passes, exclude, False, 1)
    inputs = {"user": np.arange(USERS), "exclude": exclude, "require_tags": wanted}
    with contextlib.closing(runtime.load(version, options=runtime.RunOptions(lookups="native"))) as server:
        answers = capi.predict(version, inputs, signature="filtered"), answer(server, "filtered", inputs)
    for found in answers:
        for user in range(USERS):
            ids = found["ids"][user][: min(K, passes[user].sum())]
            assert passes[user][ids].all()
            assert len({*ids.tolist()}) == len(ids), "none is there twice"
            assert (found["ids"][user][len(ids) :] == -1).all()
            if passes[user].sum() <= K + 2:  # too few in the partitions that are read: all are compared
                np.testing.assert_allclose(
                    found["scores"][user][: len(ids)],
                    -np.sort(-scores[user][passes[user]])[: len(ids)],
                    rtol=1e-4,
                    atol=1e-5,
                )
    np.testing.assert_allclose(answers[0]["scores"], answers[1]["scores"], rtol=1e-4, atol=1e-5)
