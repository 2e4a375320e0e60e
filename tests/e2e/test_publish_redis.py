"""Rows in a real Redis: what is published is what the checkpoint has, and what is missing or damaged is an error."""

import asyncio
import collections
import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
import trustme
import yaml
from click.testing import CliRunner
from redis.crc import key_slot

from tests.support import redis_servers
from tests.support.export.fakes import write_checkpoint
from tests.support.export.in_process import exports_in_this_process
from tests.support.export.overlays import overlays_of_any_size
from tests.support.messages import refused, said
from tpuembed import export_saved_model
from tpuembed.checkpoint.tools import read_rows
from tpuembed.errors import ConfigError, ExportError, RowRangeError, RowStoreDataError, RowStoreError, UnknownTableError
from tpuembed.export import publish_rows as publishing
from tpuembed.export.publish_rows import publish_rows
from tpuembed.manifest import Manifest, NamesEntry
from tpuembed.row_store import PublishedModel, RowStore, connect
from tpuembed.row_store.client import PASSWORD_VARIABLE, Keys
from tpuembed.row_store.keys import TAGS
from tpuembed_cli.main import cli
from tpuembed_serving.core.servable import State
from tpuembed_serving.core.shards_file import ShardsFile
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.tf_serving.redis_rows import RedisRows
from tpuembed_serving.tf_serving.redis_shard import RedisPredictions, RedisStates
from tpuembed_serving.tf_serving.shards import Shards

pytestmark = redis_servers.needs_redis

Array = npt.NDArray[Any]
SIZES = {"a": (500, 8), "b": (300, 5), "c": (70, 16)}
STORAGE = {"a": "float32", "b": "int8", "c": "bfloat16"}
GROWN = 7
FEATURES: dict[str, Any] = {
    "one": {"table": "a", "input": "id"},
    "zeros": {"table": "b", "input": "id", "out_of_vocabulary": "zeros"},
    "mean": {"table": "a", "combiner": "mean", "out_of_vocabulary": 9},
    "weighed": {"table": "c", "weighted": True, "combiner": "sqrtn"},
    "sequence": {"table": "b", "max_sequence_length": 3},
}


def tables(seed: int, grown: int = 0) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=(rows + grown, dim)).astype(np.float32) for name, (rows, dim) in SIZES.items()}


@dataclasses.dataclass(frozen=True)
class Trained:
    """Version 1, full; 2, an overlay of it with changed and new rows; 3, other rows altogether.

    Attributes:
        model_dir: of the versions.
        values: what the checkpoint of each version had, and how: as float32 to the last bit in table a.
        changed: the rows of the overlay, by the report of its export.
    """

    model_dir: Path
    values: dict[int, dict[str, Array]]
    changed: int | None


@pytest.fixture(scope="module")
@overlays_of_any_size()
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    changed = tables(1)
    for name, table in changed.items():
        table[::9] = tables(2)[name][::9]
        changed[name] = np.concatenate([table, tables(3, GROWN)[name][-GROWN:]])
    values = {1: tables(1), 2: changed, 3: tables(4)}
    changed_rows: int | None = None
    with exports_in_this_process():
        for number, content in values.items():
            write_checkpoint(folder / "ckpt", content)
            options: dict[str, Any] = {"base": "latest"} if number == 2 else {}
            report = export_saved_model(
                folder / "ckpt",
                folder / "rec",
                serving_config={"features": FEATURES},
                storage=STORAGE,
                layout="mmap" if number < 3 else "variables",
                **options,
            )
            changed_rows = report.rows_changed if number == 2 else changed_rows
    return Trained(folder / "rec", values, changed_rows)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis_servers.Server]:
    with redis_servers.server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(running: redis_servers.Server) -> redis_servers.Server:
    with running.client() as client:
        client.flushall()
    return running


@pytest.fixture
def store(server: redis_servers.Server) -> Iterator[RowStore]:
    opened = connect(server.url)
    yield opened
    opened.close()


def check_rows(rows: RedisRows, trained: Trained, version: int) -> None:
    """Compare all rows, in another order and some twice, with those of the checkpoint."""
    random = np.random.default_rng(version)
    wanted = {
        name: random.integers(0, len(values), 2 * len(values)) for name, values in trained.values[version].items()
    }
    wanted = {
        name: np.concatenate([ids, random.permutation(len(trained.values[version][name]))])
        for name, ids in wanted.items()
    }
    found = rows.read(rows.open(version), wanted)
    values = trained.values[version]
    np.testing.assert_array_equal(found["a"], values["a"][wanted["a"]])
    np.testing.assert_array_equal(
        found["c"], tf.cast(tf.cast(values["c"], tf.bfloat16), tf.float32).numpy()[wanted["c"]]
    )
    int8 = read_rows(trained.model_dir / str(version), "b", 0, len(values["b"])).values
    np.testing.assert_array_equal(found["b"], int8[wanted["b"]])
    np.testing.assert_allclose(found["b"], values["b"][wanted["b"]], atol=0.05)


def keys_in(server: redis_servers.Server) -> int:
    with server.client() as client:
        return int(client.dbsize())


def test_all_versions_in_turn(trained: Trained, server: redis_servers.Server, store: RowStore) -> None:
    rows, model = RedisRows(store, "rec"), PublishedModel(store, "rec")
    first = publish_rows(trained.model_dir, server.url, version=1)
    assert (first.rows_written, first.bytes_reused, model.current()) == (870, 0, 1)
    assert keys_in(server) == 871
    check_rows(rows, trained, 1)

    overlay = publish_rows(trained.model_dir, server.url, version=2)
    changed = sum(-(-rows // 9) + GROWN for rows, _ in SIZES.values())
    assert overlay.rows_written == changed == trained.changed, "the pieces of its indexes are no rows"
    assert overlay.bytes_reused == first.bytes_written
    for version in (1, 2):
        check_rows(rows, trained, version)

    third = publish_rows(trained.model_dir, server.url)  # the newest
    assert (third.version, third.removed, model.current(), model.numbers()) == (3, (1,), 3, [2, 3])
    for version in (2, 3):
        check_rows(rows, trained, version)
    again = publish_rows(trained.model_dir, server.url, keep=1)
    assert (again.rows_written, again.removed) == (0, (2,))
    assert keys_in(server) == 871

    with refused(UnknownTableError):
        RedisRows(store, "rec").open(2)
    back = publish_rows(trained.model_dir, server.url, version=1)
    assert (back.rows_written, model.current(), model.numbers()) == (870, 1, [1, 3])


def test_an_interrupted_publish_resumes(
    trained: Trained, server: redis_servers.Server, store: RowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_CHUNK_ROWS", 40)

    class StopError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise StopError

    with pytest.raises(StopError):
        publish_rows(trained.model_dir, server.url, version=1, on_progress=stop)
    assert PublishedModel(store, "rec").current() is None
    written = keys_in(server) - 1
    assert 0 < written < 870
    assert publish_rows(trained.model_dir, server.url, version=1).rows_written == 870 - written
    check_rows(RedisRows(store, "rec"), trained, 1)


def test_what_an_abandoned_publish_wrote_is_removed(
    trained: Trained, server: redis_servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_CHUNK_ROWS", 40)

    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        publish_rows(trained.model_dir, server.url, version=1, on_progress=fail)
    publish_rows(trained.model_dir, server.url, version=3)
    assert keys_in(server) == 871


def test_missing_rows_and_rows_of_another_length(
    trained: Trained, server: redis_servers.Server, store: RowStore
) -> None:
    publish_rows(trained.model_dir, server.url, version=1)
    rows, model = RedisRows(store, "rec"), PublishedModel(store, "rec")
    record = model.version(1)
    assert record is not None
    (array,) = [one for one in record.arrays.values() if one.rows == 500]
    key = Keys.of([(model.keys_of(array), np.array([5]))]).keys[0].tobytes()
    content = store.client.get(key)
    for damaged in (content[:-1], b"", content + b"x"):
        store.client.set(key, damaged)
        with pytest.raises(RowStoreDataError, match="row 5 of table a has "):
            rows.read(rows.open(1), {"c": np.array([1]), "a": np.array([4, 5, 6])})
    store.client.delete(key)
    with pytest.raises(RowStoreDataError, match="row 5 of table a is missing"):
        rows.read(rows.open(1), {"a": np.array([5])})
    assert publish_rows(trained.model_dir, server.url, version=1).rows_written == 0  # Redis should have it
    assert publish_rows(trained.model_dir, server.url, version=1, rewrite=True).rows_written == 870
    check_rows(rows, trained, 1)


def test_records_that_differ(trained: Trained, server: redis_servers.Server, store: RowStore) -> None:
    publish_rows(trained.model_dir, server.url, version=2)
    model = PublishedModel(store, "rec")
    record = model.version(2)
    assert record is not None
    array = record.arrays["c"] if "c" in record.arrays else next(iter(record.arrays.values()))
    for other in (dataclasses.replace(array, crc32c=7), dataclasses.replace(array, written=3)):
        store.client.hset(model.key, f"array:{array.id}", other.to_json())
        with pytest.raises(RowStoreDataError, match="Publish the version again"):
            RedisRows(store, "rec").open(2)
    store.client.hset(model.key, f"array:{array.id}", dataclasses.replace(array, crc32c=7).to_json())
    with pytest.raises(ExportError, match="Publish under another name"):
        publish_rows(trained.model_dir, server.url, version=2)
    store.client.hset(model.key, f"array:{array.id}", dataclasses.replace(array, written=array.rows).to_json())

    (words,) = [one for name, one in record.arrays.items() if one.row_bytes == one.size == 8 * -(-(500 + GROWN) // 32)]
    key = Keys.of([(model.keys_of(words), np.array([0]))]).keys[0].tobytes()
    store.client.setrange(key, 9, b"x")
    with pytest.raises(RowStoreDataError, match="CRC32C"):
        RedisRows(store, "rec").open(2)

    text = json.loads(store.client.hget(model.key, "version:2"))
    for wrong in ({**text, "digest": "0"}, {**text, "format": 9}, {"format": 1}, {**text, "manifest": "{}"}, 3):
        store.client.hset(model.key, "version:2", json.dumps(wrong))
        with pytest.raises(RowStoreDataError, match="is damaged"):
            RedisRows(store, "rec").open(2)


def test_a_version_of_another_export_is_refused(trained: Trained, server: redis_servers.Server, tmp_path: Path) -> None:
    publish_rows(trained.model_dir, server.url, version=1)
    write_checkpoint(tmp_path / "ckpt", tables(8))
    with exports_in_this_process():
        export_saved_model(tmp_path / "ckpt", tmp_path / "rec", serving_config={"features": {"one": FEATURES["one"]}})
    with pytest.raises(ConfigError, match="is or was another export"):
        publish_rows(tmp_path / "rec", server.url)
    publish_rows(trained.model_dir, server.url, version=2, keep=1)  # removes version 1
    with pytest.raises(ConfigError, match="is or was another export"):
        publish_rows(tmp_path / "rec", server.url)
    assert publish_rows(tmp_path / "rec", server.url, name="rec-2").version == 1


def test_a_damaged_file_is_never_published(
    trained: Trained, server: redis_servers.Server, store: RowStore, tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(trained.model_dir / "1", tmp_path / "rec" / "1")
    file = max(
        (tmp_path / "rec" / "1").rglob("*"),
        key=lambda path: path.stat().st_size if path.is_file() and path.suffix != ".pb" else 0,
    )
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    for _ in range(2):
        with pytest.raises(ExportError, match="the manifest has 0x"):
            publish_rows(tmp_path / "rec", server.url)
    assert PublishedModel(store, "rec").current() is None
    publish_rows(trained.model_dir, server.url, version=1)
    with pytest.raises(ExportError, match="the manifest has 0x"):
        publish_rows(tmp_path / "rec", server.url, rewrite=True)
    check_rows(RedisRows(store, "rec"), trained, 1)


def test_one_publish_at_a_time(trained: Trained, server: redis_servers.Server, store: RowStore) -> None:
    lock = store.client.lock("tpuembed:rec:lease", timeout=60, thread_local=False)
    assert lock.acquire(blocking=False)
    with refused(ExportError):
        publish_rows(trained.model_dir, server.url)
    lock.release()
    publish_rows(trained.model_dir, server.url)


def test_a_publish_that_lost_its_lease_changes_nothing(
    trained: Trained, server: redis_servers.Server, store: RowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_CHUNK_ROWS", 40)
    others = list[int]()

    def lose_it(done: int, total: int) -> None:
        if done > total / 2 and not others:
            store.client.delete("tpuembed:rec:lease")
            others.append(
                publish_rows(trained.model_dir, server.url, version=3).version
            )  # removes what the first has written

    with refused(ExportError):
        publish_rows(trained.model_dir, server.url, version=1, on_progress=lose_it)
    assert (others, PublishedModel(store, "rec").current()) == ([3], 3)
    publish_rows(trained.model_dir, server.url, version=1)
    for version in (1, 3):
        check_rows(RedisRows(store, "rec"), trained, version)


def test_a_publish_that_lost_its_lease_removes_nothing(
    trained: Trained, server: redis_servers.Server, store: RowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_CHUNK_ROWS", 40)
    publish_rows(trained.model_dir, server.url, version=1)
    remove, others = RowStore.remove, list[int]()

    def stopped(self: RowStore, *arguments: Any) -> None:
        remove(self, *arguments)
        if not others:  # as if it was stopped here
            store.client.delete("tpuembed:rec:lease")
            others.append(publish_rows(trained.model_dir, server.url, version=1).version)

    monkeypatch.setattr(RowStore, "remove", stopped)
    with pytest.raises(ExportError, match="another process has begun to publish"):
        publish_rows(trained.model_dir, server.url, version=3, keep=1)
    assert (others, PublishedModel(store, "rec").current()) == ([1], 1)
    check_rows(RedisRows(store, "rec"), trained, 1)


def test_ids_and_tables_that_do_not_exist(trained: Trained, server: redis_servers.Server, store: RowStore) -> None:
    publish_rows(trained.model_dir, server.url, version=2)
    rows = RedisRows(store, "rec")
    for ids in ([-1], [3, 507]):
        with refused(RowRangeError):
            rows.read(rows.open(2), {"a": np.array(ids)})
    with refused(UnknownTableError):
        rows.read(rows.open(2), {"z": np.array([1])})
    assert rows.read(rows.open(2), {"a": np.array([], np.int64)})["a"].shape == (0, 8)


def test_exports_that_rows_cannot_answer_for(trained: Trained, tmp_path: Path) -> None:
    manifest = Manifest.read(trained.model_dir / "1")
    assert manifest is not None
    named = dataclasses.replace(manifest.features[0], names="string")
    names = (NamesEntry(table=named.table, dtype="string", count=1),)
    for number, other in enumerate(
        (dataclasses.replace(manifest, features=()), dataclasses.replace(manifest, features=(named,), names=names)), 1
    ):
        other.write(tmp_path / str(number))
        with refused(ConfigError):
            publish_rows(tmp_path, "redis://127.0.0.1:1", version=number)
    with refused(ConfigError):
        publish_rows(tmp_path, "redis://127.0.0.1:1", version=7)
    with refused(ConfigError):
        publish_rows(tmp_path / "none", "redis://127.0.0.1:1")
    (tmp_path / "shop" / "shard-0" / "1").mkdir(parents=True)
    (tmp_path / "shop" / "shards.yaml").write_text("format: 1\n")
    for chosen in (None, 1):
        with refused(ConfigError):
            publish_rows(tmp_path / "shop", "redis://127.0.0.1:1", version=chosen)
    (tmp_path / "shop" / "front").mkdir()
    with refused(ConfigError):
        publish_rows(tmp_path / "shop", "redis://127.0.0.1:1")
    with refused(ConfigError):
        publish_rows(trained.model_dir, "redis://127.0.0.1:1", keep=0)
    manifest.write(tmp_path / "8")
    with refused(ConfigError):
        publish_rows(tmp_path, "redis://127.0.0.1:1")


# ---- features


def inputs(random: np.random.Generator, version: int, batch: int) -> dict[str, Array]:
    more = GROWN if version == 2 else 0
    found: dict[str, Array] = {}
    for name, spec in FEATURES.items():
        rows = SIZES[spec["table"]][0] + more
        shape = (batch,) if spec.get("input") == "id" else (batch, int(random.integers(0, 5)))
        ids = random.integers(0, rows, shape)
        if "out_of_vocabulary" in spec:
            ids = np.where(random.random(shape) < 0.3, rows + 3, ids)
        if len(shape) == 2:
            ids = np.where(random.random(shape) < 0.3, -1, ids)
        found[name] = ids
        if spec.get("weighted"):
            found[f"{name}_weights"] = random.choice(np.array([0, 0.5, 1, -1, 3], np.float32), shape)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("version", [1, 2])
def test_features_are_those_of_the_graph(trained: Trained, server: redis_servers.Server, version: int) -> None:
    publish_rows(trained.model_dir, server.url, version=version)
    loaded = tf.saved_model.load(str(trained.model_dir / str(version)))  # which holds the variables
    graph = loaded.signatures["serving_default"]
    states, random = RedisStates(server.url), np.random.default_rng(version)
    assert [status.version for status in states.versions("rec")] == [version]
    _, (signatures, in_json) = states.definitions("rec", version)
    signature = signatures["serving_default"]
    assert in_json["serving_default"]["inputs"]["one"]["dtype"] == "DT_INT64"
    lists = {name for name, spec in FEATURES.items() if spec.get("input") != "id"}
    padded = dict(zip([info.alias for info in signature.inputs], signature.padding, strict=True))
    assert {name for name, value in padded.items() if value == -1} == lists

    async def ask() -> None:
        predictions = RedisPredictions(server.url)
        for batch in (1, 3, 50):
            given = inputs(random, version, batch)
            ordered = [given[info.alias] for info in signature.inputs]
            found = await predictions.run("rec", version, signature, ordered, 10.0)
            theirs = graph(**{name: tf.constant(value) for name, value in given.items()})
            for info, value in zip(signature.outputs, found, strict=True):
                np.testing.assert_allclose(value, theirs[info.alias].numpy(), rtol=1e-5, atol=1e-6, err_msg=info.alias)
                if FEATURES[info.alias].get("input") == "id":
                    np.testing.assert_array_equal(value, theirs[info.alias].numpy())
        given["one"] = np.array([*given["one"][1:], 10_000])
        with pytest.raises(StatusError, match="feature one: id 10000 of row 49 is not in table a") as caught:
            await predictions.run("rec", version, signature, [given[info.alias] for info in signature.inputs], 10.0)
        assert caught.value.code is Code.INVALID_ARGUMENT
        with pytest.raises(StatusError, match="has no version 9") as caught:
            await predictions.run("rec", 9, signature, ordered, 10.0)
        assert caught.value.code is Code.NOT_FOUND
        predictions.close()

    asyncio.run(ask())
    with pytest.raises(StatusError, match="no version 9"):
        states.definitions("rec", 9)
    with pytest.raises(StatusError, match="have no labels"):
        states.definitions("rec", None, "stable")
    with pytest.raises(StatusError, match="has no version of model other"):
        states.versions("other")
    states.close()


@pytest.mark.nightly
def test_a_number_that_another_export_has_after_redis_was_emptied(tmp_path: Path, server: redis_servers.Server) -> None:
    rows = np.random.default_rng(1).normal(size=(9, 4)).astype(np.float32)
    path = tf.train.Checkpoint(a=tf.Variable(rows, name="a")).write(str(tmp_path / "ckpt"))
    for combiner in ("sum", "mean"):
        config = {"features": {"x": {"table": "a", "combiner": combiner}}}
        export_saved_model(path, tmp_path / combiner / "again", serving_config=config)
    states, predictions = RedisStates(server.url), RedisPredictions(server.url)

    async def ask(combiner: str) -> list[State]:
        publish_rows(tmp_path / combiner / "again", server.url)
        seen = [states.versions("again")[0].state, states.versions("again")[0].state]
        await asyncio.sleep(1.1)
        _, (signatures, _) = states.definitions("again", 1)
        signature = signatures["serving_default"]
        (found,) = await predictions.run("again", 1, signature, [np.array([[2, 5]])], 10.0)
        wanted = rows[[2, 5]].sum(0) if combiner == "sum" else rows[[2, 5]].mean(0)
        np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-6)
        return seen

    async def scenario() -> None:
        assert await ask("sum") == [State.AVAILABLE, State.AVAILABLE]
        connect(server.url).client.flushall()
        assert await ask("mean") == [State.END, State.AVAILABLE], "its signature is read again"

    asyncio.run(scenario())
    predictions.close()
    states.close()


@pytest.mark.nightly
def test_rows_are_those_of_the_version_that_was_opened(tmp_path: Path, server: redis_servers.Server) -> None:
    """A request that had opened a version read rows of another export, if Redis was filled again in between."""
    random, store = np.random.default_rng(1), connect(server.url)
    tables = [random.normal(size=(9, 4)).astype(np.float32) for _ in range(2)]
    for number, table in enumerate(tables):
        path = tf.train.Checkpoint(a=tf.Variable(table, name="a")).write(str(tmp_path / f"ckpt{number}"))
        config = {"features": {"x": {"table": "a", "input": "id"}}}
        export_saved_model(path, tmp_path / str(number) / "again", serving_config=config)
    rows, ids = RedisRows(store, "again"), np.array([2, 5])
    publish_rows(tmp_path / "0" / "again", server.url)
    opened = rows.open(1)
    np.testing.assert_array_equal(rows.read(opened, {"a": ids})["a"], tables[0][ids])
    store.client.flushall()
    publish_rows(tmp_path / "1" / "again", server.url)
    time.sleep(1.1)
    with pytest.raises(RowStoreDataError, match="row 2 of table a is missing"):
        rows.read(opened, {"a": ids})
    np.testing.assert_array_equal(rows.read(rows.open(1), {"a": ids})["a"], tables[1][ids])
    store.close()


@pytest.mark.nightly
def test_a_version_that_is_published_again_is_no_damage(tmp_path: Path, server: redis_servers.Server) -> None:
    """A front asks again after ABORTED. DATA_LOSS failed its request, and told to change settings of Redis."""
    random, config = np.random.default_rng(1), {"features": {"x": {"table": "a", "input": "id"}}}
    tables = [random.normal(size=(9, 4)).astype(np.float32) for _ in range(2)]
    for number, table in enumerate(tables):
        path = tf.train.Checkpoint(a=tf.Variable(table, name="a")).write(str(tmp_path / f"ckpt{number}"))
        export_saved_model(path, tmp_path / str(number) / "again", serving_config=config)
    states, predictions = RedisStates(server.url), RedisPredictions(server.url)

    async def ask() -> Any:
        _, (signatures, _) = states.definitions("again", 1)
        return await predictions.run("again", 1, signatures["serving_default"], [np.array([2])], 10.0)

    async def scenario() -> None:
        publish_rows(tmp_path / "0" / "again", server.url)
        await ask()
        connect(server.url).client.flushall()
        publish_rows(tmp_path / "1" / "again", server.url)
        with pytest.raises(StatusError) as caught:
            await ask()
        assert caught.value.code is Code.ABORTED
        (found,) = await ask()
        np.testing.assert_array_equal(found, tables[1][[2]])
        client = connect(server.url).client
        client.delete(*[key for key in client.keys("*") if key != b"tpuembed:again"])
        with pytest.raises(StatusError) as caught:
            await ask()
        assert caught.value.code is Code.DATA_LOSS

    asyncio.run(scenario())
    predictions.close()
    states.close()


def test_a_redis_that_is_away(trained: Trained) -> None:
    states = RedisStates("redis://127.0.0.1:1")
    with pytest.raises(StatusError, match="Connection refused") as caught:
        states.versions("rec")
    assert caught.value.code is Code.UNAVAILABLE
    states.close()


def test_a_redis_that_is_killed_fails_requests_at_once(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread waits between its tries. Its pauses are counted, because a busy machine stretches all else."""
    pauses, sleep = collections.defaultdict[int, float](float), time.sleep

    def counted(seconds: float) -> None:
        pauses[threading.get_ident()] += seconds
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", counted)
    with redis_servers.server(tmp_path / "redis") as server:
        publish_rows(trained.model_dir, server.url, version=1)
        states, predictions = RedisStates(server.url), RedisPredictions(server.url)
        _, (signatures, _) = states.definitions("rec", 1)
        signature = signatures["serving_default"]
        given = inputs(np.random.default_rng(1), 1, 3)
        ordered = [given[info.alias] for info in signature.inputs]

        async def ask() -> list[Array]:
            return await predictions.run("rec", 1, signature, ordered, 30.0)

        async def scenario() -> None:
            before = await ask()
            server.kill()
            for most in (2.5, 0.0):  # the second request knows that the first has tried for long enough
                pauses.clear()
                outcomes = await asyncio.gather(*[ask() for _ in range(40)], return_exceptions=True)
                assert max(pauses.values(), default=0.0) <= most
                for outcome in outcomes:
                    assert isinstance(outcome, StatusError)
                    assert outcome.code is Code.UNAVAILABLE
                    assert "Connection refused" in outcome.message
            with redis_servers.server(tmp_path / "again", port=server.port) as again:
                publish_rows(trained.model_dir, again.url, version=1)
                for one, other in zip(before, await ask(), strict=True):
                    np.testing.assert_array_equal(one, other)

        asyncio.run(scenario())
        predictions.close()
        states.close()


def test_a_redis_that_starts_again_is_waited_for(trained: Trained, tmp_path: Path) -> None:
    with redis_servers.server(tmp_path / "redis") as server:
        store = connect(server.url)
        server.kill()
        with redis_servers.server(tmp_path / "again", port=server.port):
            assert store.ask("GET", b"key") is None
        store.close()


# ---- passwords, TLS, the command


def test_passwords(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    with redis_servers.server(tmp_path / "redis", "--requirepass", "s3cret-0") as server:
        for password in (None, "s3cret-1"):
            with refused(RowStoreError) as caught:
                connect(server.url, password)
            assert "s3cret" not in str(caught.value)
        (tmp_path / "password").write_text("s3cret-0\n")
        done = CliRunner().invoke(
            cli,
            [
                "publish",
                str(trained.model_dir),
                server.url,
                "--redis-password-file",
                str(tmp_path / "password"),
                "--json",
            ],
        )
        assert (done.exit_code, json.loads(done.stdout)["rows_written"]) == (0, 870), done.output
        monkeypatch.setenv(PASSWORD_VARIABLE, "s3cret-0")
        states = RedisStates(server.url)
        assert len(states.versions("rec")) == 1
        states.close()


def check_rotation(trained: Trained, url: str, nodes: Sequence[redis_servers.Server], file: Path) -> None:
    """Check that a client follows the password in `file`, for a user of each node."""

    def set_password(password: str) -> None:
        for node in nodes:
            with node.client() as client:
                client.execute_command(
                    "ACL", "SETUSER", "front", "on", "resetpass", f">{password}", "~*", "&*", "+@all"
                )
                client.execute_command("CLIENT", "KILL", "USER", "front")

    set_password("s3cret-0")
    file.write_text("s3cret-0\n")
    store = connect(url.replace("//", "//front@"), "not used", password_file=file)
    rows = RedisRows(store, "rec")
    check_rows(rows, trained, 2)
    set_password("s3cret-1")
    with refused(RowStoreError) as caught:
        check_rows(rows, trained, 2)
    assert "s3cret" not in str(caught.value)
    file.unlink()  # while it is replaced, the last one is used
    with refused(RowStoreError):
        check_rows(rows, trained, 2)
    file.write_text("s3cret-1\n")
    check_rows(rows, trained, 2)
    store.close()


def test_a_password_that_changes(trained: Trained, tmp_path: Path, server: redis_servers.Server) -> None:
    publish_rows(trained.model_dir, server.url, version=2)
    check_rotation(trained, server.url, [server], tmp_path / "password")


@pytest.mark.nightly
def test_a_password_that_changes_in_a_cluster(trained: Trained, tmp_path: Path) -> None:
    with redis_servers.cluster(tmp_path / "cluster") as cluster:
        publish_rows(trained.model_dir, cluster.url, version=2)
        check_rotation(trained, cluster.url, cluster.nodes, tmp_path / "password")


def test_the_front_has_the_password_of_a_file(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    with redis_servers.server(tmp_path / "redis", "--requirepass", "s3cret-0") as server:
        publish_rows(trained.model_dir, server.url, version=2, password="s3cret-0")
        entry = {"kind": "redis", "name": "rec", "url": server.url}
        content = {"format": 1, "model": "rec", "shards": [entry], "redis_password_file": "password"}
        (tmp_path / "shards.yaml").write_text(yaml.safe_dump(content))
        with refused(ConfigError):
            ShardsFile.read(tmp_path / "shards.yaml")
        (tmp_path / "password").write_text("s3cret-0")
        shards = Shards(ShardsFile.read(tmp_path / "shards.yaml"))
        states = shards.states()
        assert [status.version for status in states.versions("rec")] == [2]
        states.close()


def test_tls(trained: Trained, tmp_path: Path) -> None:
    authority = trustme.CA()
    paths = {name: tmp_path / f"{name}.pem" for name in ("ca-cert", "cert", "key")}
    authority.cert_pem.write_to_path(paths["ca-cert"])
    issued = authority.issue_cert("localhost")
    issued.private_key_pem.write_to_path(paths["key"])
    issued.cert_chain_pems[0].write_to_path(paths["cert"])
    with redis_servers.server(tmp_path / "redis", tls=paths) as server:
        assert publish_rows(trained.model_dir, server.url, version=1).rows_written == 870
        with pytest.raises(RowStoreError, match=r"CERTIFICATE_VERIFY_FAILED|certificate verify failed"):
            connect(server.url.partition("?")[0])


def test_the_command(trained: Trained, server: redis_servers.Server) -> None:
    done = CliRunner().invoke(cli, ["publish", str(trained.model_dir), server.url, "--version", "2", "--name", "other"])
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    address = server.url
    assert done.stdout == f"{address} other: version 2, 989 rows, 25.4 kB written\n"
    done = CliRunner().invoke(cli, ["publish", str(trained.model_dir), "redis://:s3cret@localhost", "--version", "2"])
    assert done.exit_code == 1
    said(done.stderr)
    assert "s3cret" not in done.output


# ---- a cluster whose master is killed


@pytest.mark.nightly
def test_a_killed_master(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_servers.cluster(tmp_path) as cluster:
        for version in (1, 2):
            publish_rows(trained.model_dir, cluster.url, version=version)
        stores = [connect(cluster.url) for _ in range(2)]
        assert all(store.is_cluster for store in stores)
        for store in stores:
            for version in (1, 2):
                check_rows(RedisRows(store, "rec"), trained, version)
        shares = []
        for node in cluster.nodes[:3]:
            with node.client() as client:
                shares.append(client.dbsize())
        assert min(shares) > 0.8 * sum(shares) / 3  # no table is on one node
        with cluster.moving(key_slot(TAGS[0])):  # some of its keys are on another node, and some are not
            for store in stores:
                check_rows(RedisRows(store, "rec"), trained, 2)
        singly, read_singly = list[int](), RowStore._singly

        def counting(store: RowStore, calls: Any, spans: Any, errors: Any) -> Any:
            singly.append(len(spans))
            return read_singly(store, calls, spans, errors)

        monkeypatch.setattr(RowStore, "_singly", counting)
        for store in stores:  # whose topology is old
            check_rows(RedisRows(store, "rec"), trained, 2)
        assert not singly, "a slot that has moved was read key by key, for ever"
        time.sleep(1.0)  # replication is asynchronous

        stop, outcomes = threading.Event(), list[tuple[float, str]]()
        values = trained.values[2]["a"]

        def ask(store: RowStore, seed: int) -> None:
            rows, random = RedisRows(store, "rec"), np.random.default_rng(seed)
            while not stop.is_set():
                ids = random.integers(0, len(values), 100)
                try:
                    same = np.array_equal(rows.read(rows.open(2), {"a": ids}, 0.5)["a"], values[ids])
                    outcomes.append((time.monotonic(), "" if same else "wrong"))
                except RowStoreDataError as error:
                    outcomes.append((time.monotonic(), f"wrong: {error}"))
                except RowStoreError as error:
                    outcomes.append((time.monotonic(), f"error: {error}"))

        threads = [threading.Thread(target=ask, args=(store, seed)) for seed, store in enumerate(stores)]
        for thread in threads:
            thread.start()
        time.sleep(1.5)
        killed = time.monotonic()
        cluster.nodes[1].kill()
        time.sleep(12.0)
        stop.set()
        for thread in threads:
            thread.join()
        wrong = [text for _, text in outcomes if text.startswith("wrong")]
        failed = [moment - killed for moment, text in outcomes if text.startswith("error")]
        assert not wrong
        assert all(-0.5 < moment < 8.0 for moment in failed), failed
        answered = [moment for moment, text in outcomes if not text and moment > killed + 8.0]
        assert len(answered) > 100
        window = f"{min(failed, default=0):.2f} to {max(failed, default=0):.2f} s after the kill"
        print(f"\n{len(outcomes)} requests, {len(failed)} errors, {window}")
        # The next publish goes to the new master.
        report = publish_rows(trained.model_dir, f"redis://127.0.0.1:{cluster.nodes[0].port}")
        assert report.version == 3
        for store in stores:
            check_rows(RedisRows(store, "rec"), trained, 3)
            store.close()
    assert os.environ.get(PASSWORD_VARIABLE) is None


@pytest.mark.nightly
def test_a_cluster_without_any_node_fails_requests_at_once(trained: Trained, tmp_path: Path) -> None:
    with redis_servers.cluster(tmp_path) as cluster:
        publish_rows(trained.model_dir, cluster.url, version=1)
        store = connect(cluster.url)
        rows = RedisRows(store, "rec")
        check_rows(rows, trained, 1)
        for node in cluster.nodes:
            node.kill()
        for most in (2.5, 0.5):
            start = time.monotonic()
            with pytest.raises(RowStoreError):
                rows.read(rows.open(1), {"a": np.arange(100)}, 30.0)
            assert time.monotonic() - start < most
        store.close()
