"""Names become rows in native/src/lookup.c as they do in TensorFlow's graph."""

import ctypes
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tests.support.export.fakes import random_table, write_checkpoint
from tests.support.export.in_process import exports_in_this_process
from tests.support.export.overlays import overlays_of_any_size
from tests.support.messages import refused
from tpuembed import Vocabulary, export_saved_model
from tpuembed.config import ServingConfig, ServingFeature
from tpuembed.errors import ConfigError
from tpuembed.lookup import name_index
from tpuembed.lookup.name_index import WAYS, Index, fingerprints
from tpuembed.lookup.names import find_names, row_numbers
from tpuembed.manifest import Manifest
from tpuembed.native import lookup as native
from tpuembed_serving.core.status import plain_message

pytestmark = pytest.mark.skipif(
    bool(native.available()), reason=f"native/src/lookup.c is not compiled: {native.available()}"
)

Array = npt.NDArray[Any]
NOWHERE = 1 << 62


def find(
    names: list[Any], keys: Array, numbers: Array, *, salt: bytes = b"", oov_buckets: int = 0, padded: bool = False
) -> tuple[Array, int]:
    """Return the rows of the C library, and the first unknown name."""
    library = native.load_library()
    assert not isinstance(library, str)
    struct = native._Names(
        keys=keys.ctypes.data,
        numbers=numbers.ctypes.data,
        buckets=len(keys),
        oov_buckets=oov_buckets,
        salt_bytes=len(salt),
        padded=padded,
    )
    is_text = bool(names) and isinstance(names[0], bytes)
    values = np.array([len(name) for name in names] if is_text else names, np.int64)
    content = b"".join(salt + name for name in names) if is_text else None
    rows = np.full(len(names), -77, np.int64)
    unknown = library.tpuembed_find_names(
        None, ctypes.addressof(struct), content, values.ctypes.data, len(names), rows.ctypes.data
    )
    return rows, unknown


def empty_index(buckets: int = 17) -> tuple[Array, Array]:
    return np.full((buckets, WAYS), -1, np.int64), np.full((buckets, WAYS), -1, np.int32)


def texts(random: np.random.Generator, lengths: Any) -> list[bytes]:
    return [random.bytes(length) for length in lengths]


def random_texts() -> list[bytes]:
    random = np.random.default_rng(0)
    short = texts(random, [length for length in range(301) for _ in range(20)])
    return [*short, *texts(random, random.integers(301, 5000, 200)), *texts(random, (1 << 20, (1 << 20) + 63))]


@pytest.mark.parametrize("buckets", [2**63 - 1, 1, 7, 2**40])
def test_the_hash_of_any_text_is_that_of_tensorflow(buckets: int) -> None:
    """All lengths from 0 to 300, and some beyond, of any bytes."""
    names = random_texts()
    expected = tf.strings.to_hash_bucket_fast(tf.constant(names), buckets).numpy()
    rows, unknown = find(names, *empty_index(), oov_buckets=buckets)
    np.testing.assert_array_equal(rows, expected)
    assert unknown == -1


@pytest.mark.parametrize("salt", [b"", b"1\0", b"123\0", b"x" * 70])
def test_a_salt_stands_before_names_that_are_found_and_not_before_unknown_ones(salt: bytes) -> None:
    names = list(dict.fromkeys(random_texts()))
    keys = tf.strings.to_hash_bucket_fast(tf.constant([salt + name for name in names]), 2**63 - 1).numpy()
    is_known = np.arange(len(names)) % 2 == 0
    index = Index(keys[is_known])
    rows, unknown = find(names, index.keys, index.rows, salt=salt, oov_buckets=5)
    expected = tf.strings.to_hash_bucket_fast(tf.constant(names), 5).numpy()
    expected[is_known] = 5 + np.arange(is_known.sum())
    np.testing.assert_array_equal(rows, expected)
    assert unknown == -1


class _Arrays:
    def __init__(self, index: Index, salt: bytes) -> None:
        self.keys, self.numbers = tf.constant(index.keys), tf.constant(index.rows.reshape(-1))
        self.buckets, self.salt = tf.constant(len(index.keys), tf.int64), salt


def graph(names: Array, index: Index, salt: bytes, oov_buckets: int, padded: bool) -> Array:
    given = tf.constant(names)
    numbers = find_names(given, _Arrays(index, salt))
    return row_numbers(given, numbers, Vocabulary(oov_buckets=oov_buckets), padded).numpy()


EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 1, -2, 2**62, -(2**62), 2**32, -(2**32)]


@pytest.mark.parametrize("oov_buckets", [0, 1, 3])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_of_the_graph(seed: int, padded: bool, oov_buckets: int) -> None:
    """Of any bytes and integers; the index has -1 as a name, or not."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 400))
    for kind in ("string", "int64"):
        salt = random.choice([b"", b"1\0"]) if kind == "string" else b""
        if kind == "string":
            hostile = [b"", b"\0", b"\0\0", b"\xff\xfe", b"a\0b", b"x" * (1 << 20)]
            pool = list(dict.fromkeys([*hostile, *texts(random, random.integers(0, 80, 2 * count))]))
            order = random.permutation(len(pool))
            pool = [pool[place] for place in order]
            keys = tf.strings.to_hash_bucket_fast(tf.constant([salt + name for name in pool]), 2**63 - 1).numpy()
        else:
            pool = np.unique([*EXTREMES, *random.integers(-(2**63), 2**63 - 1, 2 * count)]).tolist()
            random.shuffle(pool)
            keys = np.array(pool, np.int64)
        index = Index(keys[: len(keys) // 2])
        late = int(random.integers(0, 600))  # from here on, names are unknown too
        asked = [
            pool[place] for place in random.integers(0, np.where(np.arange(700) < late, len(pool) // 2, len(pool)))
        ]
        names = np.array(asked, object if kind == "string" else np.int64)
        rows, unknown = find(asked, index.keys, index.rows, salt=salt, oov_buckets=oov_buckets, padded=padded)
        expected = graph(names, index, salt, oov_buckets, padded)
        np.testing.assert_array_equal(rows, expected)
        nowhere = np.flatnonzero(expected == NOWHERE)
        assert unknown == (nowhere[0] if len(nowhere) else -1)
        assert len(nowhere) > 0 or oov_buckets


@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_index_gives_the_numbers_of_the_graph(seed: int) -> None:
    """Keys that are in both of their buckets, or twice in one, and numbers that are none."""
    random = np.random.default_rng(seed)
    index = Index(np.arange(60))
    index.keys[:] = random.integers(-3, 3, index.keys.shape)
    index.rows[:] = random.integers(-(2**30), 2**31, index.rows.shape)
    names = np.arange(-5, 5)
    for oov_buckets in (0, 4):
        rows, _ = find(names.tolist(), index.keys, index.rows, oov_buckets=oov_buckets)
        np.testing.assert_array_equal(rows, graph(names, index, b"", oov_buckets, padded=False))


# ---- exports

USERS = [
    b"\0",
    b"a\0b",
    b"\xff\xfe",
    "na\u00efve \u6771\u4eac".encode(),
    b"x" * (1 << 20),
    *(b"user %d" % n for n in range(150)),
]
ITEMS = [*(value for value in EXTREMES if value != -1), *range(100, 250)]
TAGS = [b"tag %d" % number for number in range(90)]
UNKNOWN: Mapping[str, list[Any]] = {
    "users": [b"nobody", b"\0\0", b"x" * ((1 << 20) - 1), b"\xff"],
    "items": [3, -3, 2**63 - 2, -(2**63) + 1],
    "tags": [b"other", b"tag", b"tag 1\0", b"more", b"and more"],
}
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "user": {"table": "users", "input": "id"},
    "user_or_none": {"table": "users", "input": "id", "out_of_vocabulary": "zeros"},
    "friends": {"table": "users", "combiner": "mean"},
    "others": {"table": "users", "combiner": "sum", "out_of_vocabulary": 7},
    "heavy": {"table": "users", "combiner": "sqrtn", "weighted": True, "out_of_vocabulary": "zeros"},
    "last": {"table": "users", "max_sequence_length": 3, "out_of_vocabulary": "zeros"},
    "row": {"table": "users", "input": "id"},
    "item": {"table": "items", "input": "id"},
    "items": {"table": "items", "combiner": "sum"},
    "tag": {"table": "tags", "input": "id", "out_of_vocabulary": "zeros"},
    "tags": {"table": "tags", "combiner": "mean", "out_of_vocabulary": 40},
}
NAMES: Mapping[str, list[Any]] = {"users": USERS, "items": ITEMS, "tags": TAGS}


class Case:
    """An export that takes names, in TensorFlow and in the C library."""

    @overlays_of_any_size()
    def __init__(self, folder: Path, is_overlay: bool) -> None:
        write_checkpoint(folder / "ckpt", {name: random_table(300, 5, seed=len(name)) for name in NAMES})
        report = self._export(folder, 80)
        if is_overlay:  # of vocabularies with more names
            write_checkpoint(folder / "ckpt", {name: random_table(300, 5, seed=len(name)) for name in NAMES})
            report = self._export(folder, 1000, base="latest")
            assert report.base is not None
        manifest = Manifest.read(report.path)
        assert manifest is not None
        self.path, self.manifest = report.path, manifest
        self.salts = {entry.table: entry.salt for entry in manifest.names}
        self.names = NAMES if is_overlay else {name: names[:80] for name, names in NAMES.items()}
        self.native = native.NativeLookups(manifest, report.path, threads=1)
        self._loaded = tf.saved_model.load(str(report.path))

    def _export(self, folder: Path, names: int, **options: Any) -> Any:
        vocabularies = {
            "users": Vocabulary(USERS[:names]),
            "items": Vocabulary(ITEMS[:names], dtype="int64", oov_buckets=2),
            "tags": Vocabulary(TAGS[:names], oov_buckets=3),
        }
        features = {
            name: ServingFeature(**spec, vocabulary=None if name == "row" else vocabularies[str(spec["table"])])
            for name, spec in FEATURES.items()
        }
        served = ServingConfig(features=features)
        return export_saved_model(folder / "ckpt", folder / "m", serving_config=served, layout="mmap", **options)

    def graph(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        given = {name: tf.constant(value) for name, value in inputs.items()}
        return {name: value.numpy() for name, value in self._loaded.signatures["serving_default"](**given).items()}

    def draw(self, seed: int, batch: int) -> dict[str, Array]:
        """Return names; unknown ones where the feature accepts them."""
        random = np.random.default_rng(seed)
        found: dict[str, Array] = {}
        for name, spec in FEATURES.items():
            shape = (batch,) if spec.get("input") == "id" else (batch, int(random.integers(0, 6)))
            if name == "row":
                found[name] = random.integers(0, 80, shape)
                continue
            table = spec["table"]
            kind = np.int64 if table == "items" else object
            known, unknown = np.array(self.names[table], kind), np.array(UNKNOWN[table], kind)
            found[name] = known[random.integers(0, len(known), shape)]
            if "out_of_vocabulary" in spec or table != "users":
                found[name] = np.where(
                    random.random(shape) < 0.3, unknown[random.integers(0, len(unknown), shape)], found[name]
                )
            if len(shape) == 2:
                found[name][random.random(shape) < 0.3] = -1 if table == "items" else b""
            if spec.get("weighted"):
                found[f"{name}_weights"] = random.random(shape).astype(np.float32)
        return found


@pytest.fixture(scope="module", params=["first", pytest.param("overlay", marks=pytest.mark.nightly)])
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    def colliding(some: Any, salt: bytes) -> Array:
        """Users without a salt have fingerprints of their own only by chance."""
        collides = not salt and len(some) and some[len(some) - 1].startswith(b"user")
        return fingerprints(some, salt) % (500 if collides else 2**63 - 1)

    with exports_in_this_process(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(name_index, "fingerprints", colliding)
        made = Case(tmp_path_factory.mktemp("names"), request.param == "overlay")
    assert made.salts["users"]
    assert not made.salts["tags"]
    return made


@pytest.mark.parametrize("batch", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("reads_ahead", [False, True])
@pytest.mark.sampled(4)
def test_lookups_of_names_are_those_of_the_graph(case: Case, batch: int, reads_ahead: bool) -> None:
    case.native.reads_ahead = reads_ahead
    for seed in range(4):
        inputs = case.draw(seed, batch)
        found, expected = case.native.named(inputs), case.graph(inputs)
        assert list(found) == list(FEATURES)
        for name, value in expected.items():
            if FEATURES[name].get("combiner"):
                np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("bad", [b"nobody", b"", "\u00dcnbekannt'\n".encode(), b"\xffno\0body" * 9])
def test_an_unknown_name_fails_with_the_message_of_the_graph(case: Case, bad: bytes) -> None:
    for name, place in (("user", 3), ("friends", (4, 1))):
        inputs = case.draw(0, 6)
        inputs["friends"] = np.array([[b"", b"user 1"]] * 6, object)
        if name == "friends" and not bad:
            continue  # padding
        inputs[name][place] = bad
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            case.graph(inputs)
        with refused(ConfigError) as ours:
            case.native.named(inputs)
        assert str(ours.value) == plain_message(raised.value.message).replace(r"\'", "'")


def test_what_are_no_names_is_refused(case: Case) -> None:
    inputs = case.draw(0, 6)
    wrong: list[tuple[str, Any]] = [
        ("user", np.array(["text"] * 6, object)),
        ("user", np.array([b"user 1"] * 6)),  # numpy cuts NULs from its ends
        ("user", np.zeros(6, np.int64)),
        ("user", np.array([[b"user 1"]] * 6, object)),
        ("item", np.array([b"1"] * 6, object)),
        ("item", np.zeros(6, np.int32)),
        ("friends", np.array([b"user 1"] * 6, object)),
        ("friends", np.array([[b"user 1"]] * 5, object)),
    ]
    for name, value in wrong:
        with refused(ConfigError):
            case.native.named(inputs | {name: value})


def test_an_index_that_is_not_in_files_is_refused(case: Case) -> None:
    names = tuple(dataclasses.replace(entry, arrays=()) for entry in case.manifest.names)
    with refused(ConfigError):
        native.NativeLookups(dataclasses.replace(case.manifest, names=names), case.path)


def test_names_of_any_strides(case: Case) -> None:
    inputs = case.draw(1, 6)
    strided = {name: np.repeat(value, 2, 0)[::2] for name, value in inputs.items()}
    strided["others"] = np.asfortranarray(inputs["others"])
    strided["items"] = np.asfortranarray(inputs["items"])
    for name, value in case.native.named(strided).items():
        np.testing.assert_array_equal(value, case.native.named(inputs)[name])
