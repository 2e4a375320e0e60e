"""Names become rows in native/src/lookup.c as they do in TensorFlow's graph."""

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
from tpuembed.lookup.name_index import fingerprints
from tpuembed.manifest import Manifest
from tpuembed.native import lookup as native
from tpuembed_serving.core.status import plain_message

pytestmark = pytest.mark.skipif(
    bool(native.available()), reason=f"native/src/lookup.c is not compiled: {native.available()}"
)

Array = npt.NDArray[Any]
EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 1, -2, 2**62, -(2**62), 2**32, -(2**32)]
RANDOM = np.random.default_rng(0)
TEXTS = [RANDOM.bytes(length) for length in range(1, 301)]  # each length, because they are hashed in different ways
USERS = [
    b"\0",
    b"a\0b",
    b"\xff\xfe",
    "na\u00efve \u6771\u4eac".encode(),
    b"x" * (1 << 20),
    *(b"user %d" % n for n in range(150)),
    *TEXTS,
]
ITEMS = [*(value for value in EXTREMES if value != -1), *range(100, 250)]
TAGS = [*(b"tag %d" % number for number in range(90)), *TEXTS]
UNKNOWN: Mapping[str, list[Any]] = {
    "users": [b"nobody", b"\0\0", b"x" * ((1 << 20) - 1), b"\xff"],
    "items": [3, -3, 2**63 - 2, -(2**63) + 1],
    "tags": [b"other", b"tag", b"tag 1\0", b"more", b"and more", *(RANDOM.bytes(length) for length in range(1, 301))],
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
        write_checkpoint(folder / "ckpt", {name: random_table(700, 5, seed=len(name)) for name in NAMES})
        report = self._export(folder, 350)
        if is_overlay:  # of vocabularies with more names
            write_checkpoint(folder / "ckpt", {name: random_table(700, 5, seed=len(name)) for name in NAMES})
            report = self._export(folder, 1000, base="latest")
            assert report.base is not None
        manifest = Manifest.read(report.path)
        assert manifest is not None
        self.path, self.manifest = report.path, manifest
        self.salts = {entry.table: entry.salt for entry in manifest.names}
        self.names = NAMES if is_overlay else {name: names[:350] for name, names in NAMES.items()}
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
        collides = not salt and len(some) and some[0] == USERS[0]
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


def test_names_of_any_length_and_any_integers(case: Case) -> None:
    """The table of users has a salt before its names, and the one of tags has buckets for unknown ones."""
    known = {"user_or_none": case.names["users"], "item": case.names["items"], "tag": case.names["tags"]}
    tables = {"user_or_none": "users", "item": "items", "tag": "tags"}
    for feature, names in known.items():
        asked = [*names, *UNKNOWN[tables[feature]]]
        inputs = case.draw(0, len(asked))
        inputs[feature] = np.array(asked, np.int64 if feature == "item" else object)
        np.testing.assert_array_equal(case.native.named(inputs)[feature], case.graph(inputs)[feature])


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
