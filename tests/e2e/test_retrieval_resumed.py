"""An export of a retrieval that was interrupted makes no vector twice, and none of another tower is taken."""

import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import capi
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_retrieval
from tpuembed.errors import CheckpointCorruptError, CheckpointMismatchError
from tpuembed.retrieval.towers import Tower

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("exports_in_this_process")]

FILMS, WIDTH, BATCH = 70, 4, 10


class StoppedError(Exception):
    """What a user's dataset raises."""


def tower(name: str, rows: int, activation: str = "linear", table: str = "") -> keras.Model:
    ids = keras.Input((), dtype="int64", name=name)
    layer = TPUEmbedding({name: FeatureConfig(TableConfig(rows, WIDTH, table or f"{name}s"))}, name=f"of_{name}")
    return keras.Model({name: ids}, keras.layers.Dense(3, activation, name=f"dense_{name}")(layer({name: ids})[name]))


def query() -> keras.Model:
    return tower("user", 9)


class Films:
    """The candidates' factory: its dataset ends with an error, or the process, after some batches."""

    def __init__(self, ends_after: int = 99, *, kills: bool = False, **changes: Any) -> None:
        self.ends_after, self.kills, self.changes = ends_after, kills, changes

    def __call__(self) -> Any:
        table = self.changes.get("table", "films")
        return tower("film", FILMS, self.changes.get("activation", "linear"), table), self.batches()

    def batches(self) -> Iterator[dict[str, Any]]:
        for number, start in enumerate(range(0, FILMS, BATCH)):
            if number == self.ends_after:
                if self.kills:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise StoppedError
            films = np.arange(start, start + BATCH)
            if number == self.changes.get("batch"):
                films = films[::-1].copy()
            yield {"film": films, "id": films + self.changes.get("first_id", 100)}


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two checkpoints of the same towers."""
    found = []
    for seed in range(2):
        keras.utils.set_random_seed(seed)
        saved = tf.train.Checkpoint(query=query(), film=tower("film", FILMS), other=tower("other", FILMS))
        found.append(saved.write(str(tmp_path_factory.mktemp("trained") / "ckpt")))
    return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first film of each batch that a tower was run on."""
    firsts: list[int] = []
    run = Tower.__call__

    def counted(self: Tower, inputs: Any) -> Any:
        if "film" in inputs:
            firsts.append(int(inputs["film"][0]))
        return run(self, inputs)

    monkeypatch.setattr(Tower, "__call__", counted)
    return firsts


def export(prefix: str, folder: Path, films: Films, **options: Any) -> Any:
    version = export_retrieval(prefix, folder, query=query, candidates=films, k=FILMS, **options).path
    return capi.predict(version, {"user": np.arange(9)})


def same(found: Any, other: Any) -> bool:
    return all(np.array_equal(found[name], other[name]) for name in ("ids", "scores"))


def _killed(prefix: str, folder: str, after: int) -> None:
    export(prefix, Path(folder), Films(after, kills=True))


@pytest.mark.parametrize("kills", [False, True])
def test_what_was_made_is_used_again(prefixes: list[str], tmp_path: Path, made: list[int], kills: bool) -> None:
    whole = export(prefixes[0], tmp_path / "whole", Films())
    folder = tmp_path / "m"
    made.clear()
    for after in (3, 5):
        if kills:
            process = multiprocessing.get_context("spawn").Process(
                target=_killed, args=(prefixes[0], str(folder), after)
            )
            process.start()
            process.join(120)
            assert process.exitcode == -signal.SIGKILL
        else:
            with pytest.raises(StoppedError):
                export(prefixes[0], folder, Films(after))
    assert made == ([] if kills else [0, 10, 20, 30, 40])
    made.clear()
    assert same(export(prefixes[0], folder, Films()), whole)
    assert made == [50, 60]
    assert [path.name for path in folder.iterdir()] == ["1"], "nothing is left"
    assert same(export(prefixes[0], folder, Films()), whole)
    assert len(made) == 2 + 7, "the next export begins anew"


CHANGES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "table": ({"table": "others"}, [0, 10, 20, 30, 40, 50, 60]),
    "activation": ({"activation": "relu"}, [0, 10, 20, 30, 40, 50, 60]),
    "a batch's inputs": ({"batch": 2}, [29, 30, 40, 50, 60]),
    "ids alone": ({"first_id": 500}, [40, 50, 60]),
}


@pytest.mark.parametrize("change", [*CHANGES, "checkpoint", "metric", "damage", "a torn end"])
def test_vectors_of_something_else_are_made_anew(
    prefixes: list[str], tmp_path: Path, made: list[int], change: str
) -> None:
    folder = tmp_path / "m"
    with pytest.raises(StoppedError):
        export(prefixes[0], folder, Films(4))
    changes, expected = CHANGES.get(change, ({}, [40, 50, 60]))
    prefix, options = prefixes[change == "checkpoint"], {"metric": "cosine"} if change == "metric" else {}
    if change == "checkpoint":
        expected = [0, 10, 20, 30, 40, 50, 60]
    (file,) = folder.rglob("made_vectors")
    data = bytearray(file.read_bytes())
    if change == "damage":  # in the third of four batches
        data[-200] ^= 1
        file.write_bytes(data)
        expected = [20, 30, 40, 50, 60]
    if change == "a torn end":
        file.write_bytes(data[:-5])
        expected = [30, 40, 50, 60]
    made.clear()
    found = export(prefix, folder, Films(**changes), **options)
    assert made == expected
    shutil.rmtree(folder)
    assert same(found, export(prefix, folder, Films(**changes), **options))


def test_another_root_of_the_checkpoint_is_another_tower(tmp_path: Path, made: list[int]) -> None:
    def towers() -> dict[str, Any]:
        return {"query": query(), "film": embedded("film")}

    def embedded(name: str) -> keras.Model:
        ids = keras.Input((), dtype="int64", name=name)
        layer = TPUEmbedding({name: FeatureConfig(TableConfig(FILMS, 3, "films"))}, name="of_film")
        return keras.Model({name: ids}, layer({name: ids})[name])

    class Embedded(Films):
        def __call__(self) -> Any:
            return embedded("film"), self.batches()

    saved = tf.train.Checkpoint(**{root: tf.train.Checkpoint(**towers()) for root in ("model", "average")})
    prefix = saved.write(str(tmp_path / "ckpt"))
    with pytest.raises(StoppedError):
        export(prefix, tmp_path / "m", Embedded(4), checkpoint_options={"root": "model"})
    made.clear()
    found = export(prefix, tmp_path / "m", Embedded(), checkpoint_options={"root": "average"})
    assert made == [0, 10, 20, 30, 40, 50, 60]
    assert same(found, export(prefix, tmp_path / "whole", Embedded(), checkpoint_options={"root": "average"}))


@pytest.mark.parametrize("moment", ["candidates", "query"])
def test_a_checkpoint_that_is_replaced_meanwhile_is_an_error(prefixes: list[str], tmp_path: Path, moment: str) -> None:
    for number, prefix in enumerate(prefixes):
        shutil.copytree(Path(prefix).parent, tmp_path / str(number))

    def replace() -> None:
        for file in (tmp_path / "1").iterdir():
            shutil.copy(file, tmp_path / "0")

    class Replaced(Films):
        def batches(self) -> Iterator[dict[str, Any]]:
            for number, batch in enumerate(super().batches()):
                if number == 3 and moment == "candidates":
                    replace()
                yield batch

    def other_query() -> keras.Model:
        if moment == "query":
            replace()
        return query()

    error = (
        CheckpointMismatchError if moment == "candidates" else CheckpointCorruptError
    )  # the weights have other checksums
    with pytest.raises(error, match="changed during its export" if moment == "candidates" else "Restore it from"):
        export_retrieval(tmp_path / "0" / "ckpt", tmp_path / "m", query=other_query, candidates=Replaced(), k=3)
    assert not [*(tmp_path / "m").glob("[0-9]*")]


def test_a_tower_that_reads_a_file_is_run_again(prefixes: list[str], tmp_path: Path, made: list[int]) -> None:
    (tmp_path / "factor").write_text("2", encoding="utf-8")

    class WithFile(Films):
        def __call__(self) -> Any:
            ids = keras.Input((), dtype="int64", name="film")
            scaled = keras.layers.Lambda(
                lambda rows: rows * tf.strings.to_number(tf.io.read_file(str(tmp_path / "factor"))), output_shape=(3,)
            )(tower("film", FILMS)({"film": ids}))
            return keras.Model({"film": ids}, scaled), self.batches()

    with pytest.raises(StoppedError):
        export(prefixes[0], tmp_path / "m", WithFile(4))
    (tmp_path / "factor").write_text("3", encoding="utf-8")
    made.clear()
    export(prefixes[0], tmp_path / "m", WithFile())
    assert len(made) == 7


def test_a_tower_that_cannot_be_compared_is_run_again(prefixes: list[str], tmp_path: Path, made: list[int]) -> None:
    class WithPython(Films):
        def __call__(self) -> Any:
            ids = keras.Input((), dtype="int64", name="film")
            found = tower("film", FILMS)({"film": ids})
            shape = (lambda given: given.shape)(found)
            added = keras.layers.Lambda(
                lambda rows: tf.ensure_shape(tf.numpy_function(lambda given: given, [rows], tf.float32), [None, 3]),
                output_shape=shape[1:],
            )(found)
            return keras.Model({"film": ids}, added), self.batches()

    with pytest.raises(StoppedError):
        export(prefixes[0], tmp_path / "m", WithPython(4))
    assert not [*(tmp_path / "m").rglob("made_vectors")]
    made.clear()
    export(prefixes[0], tmp_path / "m", WithPython())
    assert len(made) == 7
