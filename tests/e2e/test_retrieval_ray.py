"""Candidate towers on Ray: the same export as without it, also when a worker dies, and errors that say what failed."""

import importlib.util
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.e2e.test_retrieval_resumed import BATCH, FILMS, WIDTH, Films, StoppedError, query, same, tower
from tests.support import capi
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_retrieval
from tpuembed.errors import ConfigError, ExportError, TpuEmbedError

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.usefixtures("exports_in_this_process"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray, of the extra [ray]"),
]


class Elsewhere(Films):
    """Candidates whose factory does something else in other processes than here."""

    def __init__(self, folder: Path, does: str, **options: Any) -> None:
        super().__init__(**options)
        self.here, self.folder, self.does = os.getpid(), folder, does

    def __call__(self) -> Any:
        if os.getpid() == self.here:
            return super().__call__()
        (self.folder / str(os.getpid())).touch()
        if self.does == "dies once" and len(list(self.folder.iterdir())) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.does == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.does == "differs":
            return tower("film", FILMS, "relu"), []
        return super().__call__()


class Lists:
    """Candidates of ragged and sparse inputs."""

    def __call__(self) -> Any:
        inputs = {
            "ragged": keras.Input((None,), dtype="int64", ragged=True, name="ragged"),
            "sparse": keras.Input((None,), dtype="int64", sparse=True, name="sparse"),
        }
        table = TableConfig(FILMS, WIDTH, "films", combiner="sum")
        rows = TPUEmbedding({name: FeatureConfig(table) for name in inputs}, name="of_film")(inputs)
        joined = keras.layers.Dense(3, name="dense_film")(keras.layers.Add()([rows["ragged"], rows["sparse"]]))
        return keras.Model(inputs, joined), self.batches()

    def batches(self) -> Iterator[dict[str, Any]]:
        random = np.random.default_rng(0)
        for start in range(0, FILMS, BATCH):
            ragged = tf.RaggedTensor.from_row_lengths(
                tf.constant(random.integers(0, FILMS, 2 * BATCH)), random.multinomial(2 * BATCH, np.ones(BATCH) / BATCH)
            )
            sparse = tf.sparse.from_dense(random.integers(0, 2, (BATCH, 3)) * random.integers(1, FILMS, (BATCH, 3)))
            yield {"ragged": ragged, "sparse": sparse, "id": np.arange(start, start + BATCH)}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    keras.utils.set_random_seed(0)
    saved = tf.train.Checkpoint(query=query(), film=tower("film", FILMS), other=tower("other", FILMS))
    return str(saved.write(str(tmp_path_factory.mktemp("trained") / "ckpt")))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One cluster for all tests, which an export finds and leaves open."""
    from tpuembed.export.stream.engines.ray import connected

    with connected("local"):
        yield


def export(prefix: str, folder: Path, films: Any, **options: Any) -> Any:
    version = export_retrieval(prefix, folder, query=query, candidates=films, k=FILMS, **options).path
    return capi.predict(version, {"user": np.arange(9)})


@pytest.mark.parametrize("does", ["the same", "dies once"])
def test_a_cluster_makes_the_same_vectors(prefix: str, tmp_path: Path, does: str) -> None:
    (tmp_path / "seen").mkdir()
    films = Elsewhere(tmp_path / "seen", does)
    assert same(export(prefix, tmp_path / "ray", films, engine="ray"), export(prefix, tmp_path / "local", Films()))
    assert list((tmp_path / "seen").iterdir()), "workers built the tower"


def test_ragged_and_sparse_inputs_reach_the_workers(prefix: str, tmp_path: Path) -> None:
    found = export(prefix, tmp_path / "ray", Lists(), engine="ray", workers=2)
    assert same(found, export(prefix, tmp_path / "local", Lists()))


def test_what_was_made_is_used_again(prefix: str, tmp_path: Path) -> None:
    whole = export(prefix, tmp_path / "whole", Films())
    with pytest.raises(StoppedError):
        export(prefix, tmp_path / "m", Films(5), engine="ray", workers=1)
    (kept,) = (tmp_path / "m").rglob("made_vectors")
    assert kept.stat().st_size > BATCH * 3 * 4
    assert same(export(prefix, tmp_path / "m", Films(), engine="ray", workers=1), whole)


@pytest.mark.parametrize(("does", "error"), [("differs", ConfigError), ("dies", ExportError)])
def test_what_workers_cannot_do_is_an_error(prefix: str, tmp_path: Path, does: str, error: type[TpuEmbedError]) -> None:
    (tmp_path / "seen").mkdir()
    said = f"on node {socket.gethostname()} is not the one" if does == "differs" else "Ray lost it 4 times"
    with pytest.raises(error, match=said):
        export(prefix, tmp_path / "m", Elsewhere(tmp_path / "seen", does), engine="ray")
    assert not [*(tmp_path / "m").glob("[0-9]*")]


def test_an_id_outside_of_its_table_is_named(prefix: str, tmp_path: Path) -> None:
    class Beyond(Films):
        def batches(self) -> Iterator[dict[str, Any]]:
            yield {"film": np.array([3, FILMS]), "id": np.arange(2)}

    messages = []
    for engine in ("local", "ray"):
        with pytest.raises(ConfigError) as caught:
            export(prefix, tmp_path / engine, Beyond(), engine=engine)
        messages.append(str(caught.value))
    assert str(FILMS) in messages[0]
    assert messages[0] == messages[1]
