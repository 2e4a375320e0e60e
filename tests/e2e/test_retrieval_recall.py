"""What a search of some partitions finds, and what a filter leaves, against numpy."""

import contextlib
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
from tpuembed_serving.tensorflow import session as runtime

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

    def export(self, model_dir: Path, **options: Any) -> Any:
        return export_retrieval(self.prefix, model_dir, query=query, candidates=self.films, k=K, index="ivf", **options)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    return Exports(tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("min_recall", [0.5, 0.9])
@pytest.mark.parametrize(("layout", "names"), [("variables", False), ("mmap", True)])
def test_the_measured_recall_is_that_of_the_answers(
    exports: Exports, tmp_path: Path, layout: str, names: bool, min_recall: float
) -> None:
    np.savez(tmp_path / "users.npz", user=np.arange(USERS, dtype=np.int32))
    report = exports.export(
        tmp_path / "m",
        layout=layout,
        ids=NAMES if names else None,
        queries=tmp_path / "users.npz",
        min_recall=min_recall,
    )
    found = report.retrieval
    assert (found.measured_on, found.min_recall) == ("queries", min_recall)
    assert found.nprobe < found.partitions == found.recall[-1][0]
    assert found.recall[-1][1] == 1
    recall = dict(found.recall)[found.nprobe]
    assert recall >= min_recall
    answers = capi.predict(report.path, {"user": np.arange(USERS)})["ids"].tolist()
    numbers = [[NAMES.index(one) if names else one for one in row] for row in answers]
    scores = exports.users.astype(np.float64) @ exports.films.T
    best = np.argsort(-scores, axis=1, kind="stable")[:, :K].tolist()
    shares = [len(set(got) & set(want)) / K for got, want in zip(numbers, best, strict=True)]
    assert recall == pytest.approx(float(np.mean(shares)), abs=1e-9)
    assert f"{recall:.4f}" in run_command("describe", report.path).stdout


@pytest.mark.parametrize("layout", ["variables", "mmap"])
def test_a_filter_leaves_as_many_as_pass(exports: Exports, tmp_path: Path, layout: str) -> None:
    random = np.random.default_rng(7)
    tags = np.zeros(FILMS, np.uint64)
    rare = {1: random.choice(FILMS, 4, replace=False), 2: random.choice(FILMS, 40, replace=False)}
    for bit, numbers in rare.items():
        tags[numbers] |= bit
    report = exports.export(tmp_path / "m", tags=tags, layout=layout, min_recall=0.01)
    assert report.retrieval.nprobe < report.retrieval.partitions
    wanted = np.arange(USERS, dtype=np.uint64) % 4
    scores = exports.users @ exports.films.T
    exclude = np.argsort(-np.where(tags[None] & 2, scores, -np.inf), 1)[:, :2]
    passes = (tags[None] & wanted[:, None]) == wanted[:, None]
    np.put_along_axis(passes, exclude, False, 1)
    inputs = {"user": np.arange(USERS), "exclude": exclude, "require_tags": wanted}
    options = runtime.RunOptions(lookups="native")
    with contextlib.closing(runtime.load(report.path, options=options)) as server:  # by the C library, with layout mmap
        signature = server.signatures["filtered"]
        found = server.run(signature, [inputs[info.alias] for info in signature.inputs])
        native = {info.alias: array for info, array in zip(signature.outputs, found, strict=True)}
    answers = capi.predict(report.path, inputs, signature="filtered"), native
    for answer in answers:
        for user in range(USERS):
            ids = answer["ids"][user][: min(K, passes[user].sum())]
            assert passes[user][ids].all()
            assert len({*ids.tolist()}) == len(ids), "none is there twice"
            assert (answer["ids"][user][len(ids) :] == -1).all()
            if passes[user].sum() <= K + 2:  # too few in the partitions that are read: all are compared
                np.testing.assert_allclose(
                    answer["scores"][user][: len(ids)],
                    -np.sort(-scores[user][passes[user]])[: len(ids)],
                    rtol=1e-4,
                    atol=1e-5,
                )
    np.testing.assert_allclose(answers[0]["scores"], answers[1]["scores"], rtol=1e-4, atol=1e-5)
