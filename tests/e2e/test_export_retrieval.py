"""Exports of candidates and their index, against a brute force in numpy."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, Vocabulary, export_retrieval, export_saved_model
from tpuembed.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.tensorflow import session as runtime

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

Array = npt.NDArray[Any]
USERS, FILMS, WIDTH, DIM = 60, 900, 8, 4


def tower(table: str, rows: int, name: str) -> keras.Model:
    ids = keras.Input((), dtype="int64", name=name)
    layer = TPUEmbedding({name: FeatureConfig(TableConfig(rows, WIDTH, table))}, optimizer="sgd", name=f"of_{name}")
    return keras.Model({name: ids}, keras.layers.Dense(DIM, name=f"dense_{name}")(layer({name: ids})[name]))


def query() -> keras.Model:
    return tower("users", USERS, "user")


def films() -> tuple[keras.Model, tf.data.Dataset]:
    numbers = tf.data.Dataset.range(FILMS).batch(128)
    return tower("films", FILMS, "film"), numbers.map(film)


def film(number: Any) -> dict[str, Any]:
    return {"film": number, "id": number * 7 - 303, "tags": tf.cast(number % 4, tf.uint64)}


class Trained:
    def __init__(self, folder: Path) -> None:
        keras.utils.set_random_seed(2)
        self.query, self.film = query(), tower("films", FILMS, "film")
        for each in (self.query, self.film):  # rows that differ enough for a search to matter
            (layer,) = [one for one in each.layers if isinstance(one, TPUEmbedding)]
            (table,) = layer.embedding_tables.values()
            table.assign(tf.random.stateless_normal(table.shape, [1, table.shape[0]]))
        self.prefix = tf.train.Checkpoint(query=self.query, film=self.film).write(str(folder / "ckpt"))
        self.users: Array = self.query.predict({"user": np.arange(USERS)}, verbose=0)
        self.films: Array = self.film.predict({"film": np.arange(FILMS)}, verbose=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


def best(queries: Array, vectors: Array, k: int, passes: Array | None = None) -> tuple[Array, Array]:
    """Return numbers and scores of the best by brute force; -1 and -inf for missing ones."""
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    scores = scores if passes is None else np.where(passes, scores, -np.inf)
    scores = np.pad(scores, ((0, 0), (0, max(k - scores.shape[1], 0))), constant_values=-np.inf)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    found = np.take_along_axis(scores, order, 1)
    return np.where(found > -np.inf, order, -1), found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("index", ["exact", "ivf"])
def test_a_query_that_is_nan_finds_none(trained: Trained, tmp_path: Path, index: str) -> None:
    def scaled() -> keras.Model:
        model = query()
        return keras.Model(
            model.inputs, keras.ops.where(keras.ops.equal(model.inputs[0][:, None], 3), np.nan, model.outputs[0])
        )

    options: dict[str, Any] = {"query": scaled, "candidates": films, "k": 5, "index": index}
    if index == "ivf":
        with pytest.raises(ConfigError, match="1 of the 60 vectors"):
            export_retrieval(trained.prefix, tmp_path, **options)
    version = export_retrieval(
        trained.prefix, tmp_path, **options, queries=np.arange(3) if index == "ivf" else None
    ).path
    found = capi.predict(version, {"user": np.array([3, 4])})
    assert found["ids"][0].tolist() == [-1] * 5
    assert found["scores"][0].tolist() == [-np.inf] * 5
    np.testing.assert_array_equal(found["ids"][1], best(trained.users[4:5], trained.films, 5)[0][0] * 7 - 303)


@pytest.mark.parametrize("index", ["exact", "ivf"])
@pytest.mark.sampled(1)
def test_vectors_of_another_width_are_refused(tmp_path: Path, index: str) -> None:
    """A query's model that passes vectors on. The server's own search must read no others than it has."""

    def passed_on() -> keras.Model:
        vector = keras.Input((DIM,), name="vector")
        return keras.Model({"vector": vector}, keras.layers.Activation("tanh", name="tanh")(vector))

    vectors = np.random.default_rng(0).normal(size=(FILMS, DIM)).astype(np.float32)
    prefix = tf.train.Checkpoint(
        tables=TPUEmbedding({"x": FeatureConfig(TableConfig(2, 2, "x"))}, optimizer="sgd")
    ).write(str(tmp_path / "ckpt"))
    version = export_retrieval(
        prefix, tmp_path / "m", query=passed_on, candidates=vectors, k=5, index=index, layout="mmap"
    ).path
    for lookups in ("native", "tensorflow"):
        with contextlib.closing(runtime.load(version, options=runtime.RunOptions(lookups=lookups))) as server:
            signature = server.signatures["serving_default"]
            assert [found.shape for found in server.run(signature, [vectors[:3]])] == [(3, 5), (3, 5)]
            for shape in ((3, DIM + 1), (3, DIM - 1), (3, 1), (DIM,), (2, 2, DIM), (3, 0)):
                with pytest.raises(StatusError):
                    server.run(signature, [np.ones(shape, np.float32)])
            filtered = server.signatures["filtered"]
            assert [info.alias for info in filtered.inputs] == ["exclude", "require_tags", "vector"]
            for exclude, tags in ((np.int64, np.int64), (np.float32, np.uint64), (np.int64, np.bool_)):
                with pytest.raises(StatusError):
                    server.run(filtered, [np.zeros((3, 1), exclude), np.zeros(3, tags), vectors[:3]])


MANY = """
import resource, sys
import numpy as np
import tensorflow as tf
signature = tf.saved_model.load(sys.argv[1]).signatures["filtered"]
def peak(many):
    exclude = np.arange(many).repeat(5).reshape(-1, 5).T * 7 - 303
    found = signature(user=tf.range(5, dtype=tf.int64), exclude=tf.constant(exclude), require_tags=tf.zeros(5, tf.uint64))
    assert set(found["ids"].numpy().ravel()) == {-1} or many < 100
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak(3)
print(peak(20_000) - before)
"""


def test_many_excluded_ids_take_little_memory(trained: Trained, tmp_path: Path) -> None:
    """To compare each id with each other one would take 2 GB."""
    version = export_retrieval(trained.prefix, tmp_path, query=query, candidates=films, k=20, index="exact").path
    done = subprocess.run([sys.executable, "-c", MANY, str(version)], stdout=subprocess.PIPE, check=True, text=True)
    assert int(done.stdout.splitlines()[-1]) < 200e6


def test_other_numbers_of_rows_than_queries_are_refused(trained: Trained, tmp_path: Path) -> None:
    version = export_retrieval(trained.prefix, tmp_path, query=query, candidates=films, k=3, index="exact").path
    signature = tf.saved_model.load(str(version)).signatures["filtered"]
    for queries, exclude, tags, name in (
        (1, 2, 1, "exclude"),
        (2, 1, 2, "exclude"),
        (1, 1, 2, "require_tags"),
        (0, 0, 1, "require_tags"),
    ):
        given = {"user": tf.zeros([queries], tf.int64), "exclude": tf.zeros([exclude, 2], tf.int64)}
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"{name} must have one"):
            signature(**given, require_tags=tf.zeros([tags], tf.uint64))
    found = signature(
        user=tf.zeros([2], tf.int64), exclude=tf.zeros([2, 0], tf.int64), require_tags=tf.zeros([2], tf.uint64)
    )
    assert found["ids"].shape == (2, 3)


def test_ids_and_tags_of_lists(trained: Trained, tmp_path: Path) -> None:
    """NumPy would cut NULs at the end of strings, make strings of numbers, and make floats of large numbers."""
    ids = [b"a\0", b"a", b"c\0\0", "\u00e9\0"]
    tags = [2**63, 0, 2**63 + 1, 1]
    version = export_retrieval(
        trained.prefix, tmp_path / "m", query=query, candidates=trained.films[:4], ids=ids, tags=tags, k=4
    ).path
    found = tf.saved_model.load(str(version)).signatures["filtered"](
        user=tf.zeros([1], tf.int64), exclude=[[b"a"]], require_tags=tf.constant([0], tf.uint64)
    )
    assert set(found["ids"].numpy()[0]) == {b"a\0", b"c\0\0", "\u00e9\0".encode(), b""}
    found = tf.saved_model.load(str(version)).signatures["filtered"](
        user=tf.zeros([1], tf.int64), exclude=[[b""]], require_tags=tf.constant([2**63], tf.uint64)
    )
    assert set(found["ids"].numpy()[0]) == {b"a\0", b"c\0\0", b""}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ids": [1, "b", 3, 4]}, "ids must be integers or strings"),
        ({"tags": [1.5, 0, 0, 0]}, "tags must be integers"),
        ({"tags": [2**64, 0, 0, 0]}, "tags must be integers"),
        ({"candidates": np.full((4, 4), 1e300)}, r"vector 0 contains 1e\+300, which is too large for float32"),
    ]
    for given, says in wrong:
        with pytest.raises(ConfigError, match=says):
            export_retrieval(
                trained.prefix, tmp_path / "n", **{"query": query, "candidates": trained.films[:4], "k": 2, **given}
            )


@pytest.mark.parametrize("storage", ["int8", "bfloat16"])
def test_rows_of_a_table_are_searched_as_they_are_stored(trained: Trained, tmp_path: Path, storage: str) -> None:
    rows = tf.random.stateless_normal([300, DIM], [4, 4]).numpy()
    layer = TPUEmbedding({"film": FeatureConfig(TableConfig(300, DIM, "vectors"))}, optimizer="sgd", name="more")
    layer(tf.nest.map_structure(tf.constant, {"film": [0]}))
    next(iter(layer.embedding_tables.values())).assign(rows)
    prefix = tf.train.Checkpoint(query=trained.query, more=layer).write(str(tmp_path / "ckpt"))
    version = export_retrieval(
        prefix, tmp_path / "m", query=query, candidates="table:vectors", k=400, storage={"candidates": storage}
    ).path
    found = tf.saved_model.load(str(version)).signatures["serving_default"](user=tf.constant([3], tf.int64))
    assert found["ids"].numpy()[0, 300:].tolist() == [-1] * 100  # k is larger than the table
    ids = found["ids"].numpy()[0, :300]
    assert sorted(ids) == list(range(300))
    scores = found["scores"].numpy()[0, :300]
    assert (np.diff(scores) <= 0).all()
    np.testing.assert_allclose(scores, rows[ids] @ trained.users[3], atol=0.05)


@pytest.mark.nightly
def test_a_table_with_names_has_them_as_ids(trained: Trained, tmp_path: Path) -> None:
    names = Vocabulary(["ann", "bob", "eve"], oov_buckets=2)
    layer = TPUEmbedding(
        {"name": FeatureConfig(TableConfig(9, DIM, "named"), vocabulary=names)}, optimizer="sgd", name="named_layer"
    )
    layer({"name": tf.constant(["ann"])})
    prefix = tf.train.Checkpoint(query=trained.query, more=layer).write(str(tmp_path / "ckpt"))
    version = export_retrieval(prefix, tmp_path / "m", query=query, candidates="table:named", k=5).path
    found = tf.saved_model.load(str(version)).signatures["serving_default"](user=tf.constant([3], tf.int64))
    assert sorted(found["ids"].numpy()[0].tolist()) == [b"", b"", b"ann", b"bob", b"eve"]


def wrong(**changed: Any) -> dict[str, Any]:
    return {"query": query, "candidates": np.ones((3, DIM), np.float32), "k": 2, **changed}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (wrong(ids=["a", "", "b"]), "the padding of exclusions"),
        (wrong(ids=[1, 2]), "there are 2, but the array has 3 rows"),
        (wrong(tags=[1, -2, 3]), "tags must be integers from 0"),
        (wrong(candidates=np.ones((0, DIM))), "there are none"),
        (wrong(candidates="vectors.csv"), "expected"),
        (wrong(candidates=films, ids=[1]), "come with its dataset"),
        (wrong(min_recall=1.5), "at most 1"),
        (wrong(index="exact", queries={"user": [1]}), "this one is exact"),
        (wrong(base="latest"), "export_retrieval: unknown key 'base'"),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_left(
    trained: Trained, tmp_path: Path, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        export_retrieval(trained.prefix, tmp_path / "m", **arguments)
    assert says in str(raised.value)
    assert not (tmp_path / "m").exists()


def test_a_retrieval_is_no_base(trained: Trained, tmp_path: Path) -> None:
    export_retrieval(trained.prefix, tmp_path / "m", query=query, candidates=trained.films, k=3)
    with refused(ConfigError):
        export_saved_model(
            trained.prefix, tmp_path / "m", model=query, base="latest", allow_unused_weights=True, layout="mmap"
        )
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["1"]


@pytest.mark.nightly
def test_what_a_killed_export_left_is_removed(trained: Trained, tmp_path: Path) -> None:
    left = tmp_path / "m" / ".staging-candidates-1-dead"
    left.mkdir(parents=True)
    (left / "vectors").touch()
    export_retrieval(trained.prefix, tmp_path / "m", query=query, candidates=films, k=3)
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["1"]


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["candidates", "query"])
def test_a_checkpoint_that_is_replaced_meanwhile_is_an_error(trained: Trained, tmp_path: Path, moment: str) -> None:
    shutil.copytree(Path(trained.prefix).parent, tmp_path / "ckpt")
    other = tmp_path / "other"
    tf.train.Checkpoint(query=query(), film=tower("films", FILMS, "film")).write(str(other / "ckpt"))

    def replace() -> None:
        for file in other.iterdir():
            shutil.copy(file, tmp_path / "ckpt")

    def replaced_films() -> Any:
        def batches() -> Iterator[dict[str, Any]]:
            for number, batch in enumerate(films()[1]):
                if number == 3 and moment == "candidates":
                    replace()
                yield batch

        return films()[0], batches()

    def replaced_query() -> keras.Model:
        if moment == "query":
            replace()
        return query()

    error = CheckpointMismatchError if moment == "candidates" else CheckpointCorruptError  # weights have checksums
    with pytest.raises(error, match="changed during its export" if moment == "candidates" else "Restore it from"):
        export_retrieval(
            tmp_path / "ckpt" / "ckpt", tmp_path / "m", query=replaced_query, candidates=replaced_films, k=3
        )
    assert not [*(tmp_path / "m").glob("[0-9]*")]


@pytest.mark.nightly
def test_ragged_and_sparse_inputs_reach_the_tower(tmp_path: Path) -> None:
    def items() -> keras.Model:
        inputs = {
            "ragged": keras.Input((None,), dtype="int64", ragged=True, name="ragged"),
            "sparse": keras.Input((None,), dtype="int64", sparse=True, name="sparse"),
        }
        table = TableConfig(FILMS, DIM, "films", combiner="sum")
        rows = TPUEmbedding({name: FeatureConfig(table) for name in inputs}, name="of_film")(inputs)
        return keras.Model(inputs, keras.layers.Add()([rows["ragged"], rows["sparse"]]))

    random, count = np.random.default_rng(0), 40
    lists = [random.integers(0, FILMS, number % 4).tolist() for number in range(count)]
    dense = random.integers(0, 2, (count, 3)) * random.integers(1, FILMS, (count, 3))
    batch = {
        "ragged": tf.ragged.constant(lists, dtype=tf.int64),
        "sparse": tf.sparse.from_dense(dense),
        "id": np.arange(count),
    }
    model, asked = items(), query()
    (table,) = model.get_layer("of_film").embedding_tables.values()
    rows = tf.random.stateless_normal(table.shape, [5, 5]).numpy()
    table.assign(rows)
    prefix = tf.train.Checkpoint(query=asked, items=model).write(str(tmp_path / "ckpt"))
    version = export_retrieval(prefix, tmp_path / "m", query=query, candidates=lambda: (items(), [batch]), k=count).path
    vectors = [rows[some].sum(0) + rows[more[more > 0]].sum(0) for some, more in zip(lists, dense, strict=True)]
    users = np.arange(9)
    found = capi.predict(version, {"user": users})
    wanted, scores = best(asked.predict({"user": users}, verbose=0), np.stack(vectors), count)
    np.testing.assert_allclose(found["scores"], scores, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found["ids"][:, :5], wanted[:, :5])
