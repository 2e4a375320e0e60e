"""Exports whose features take names: the rows are those of a dictionary, and of Keras' lookup layers."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tests.support.export.fakes import random_table, write_checkpoint
from tests.support.messages import refused
from tpuembed import (
    Vocabulary,
    compact_version,
    export_saved_model,
    rollback_version,
)
from tpuembed.checkpoint.tools import verify_files
from tpuembed.config import ServingConfig, ServingFeature
from tpuembed.errors import ConfigError
from tpuembed.formats.saved_model import size_faults
from tpuembed.lookup import name_index
from tpuembed.lookup.name_index import BUCKETS, fingerprints
from tpuembed.manifest import Manifest

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

Array = npt.NDArray[Any]

ROWS, DIM = 400, 6
HOSTILE = [
    b"\0",
    b"a\0",
    b"a",
    b"A",
    b" a",
    b"a ",
    b"\xff\xfe",
    b"\xc3\x28",
    "\u00e9".encode(),
    "e\u0301".encode(),  # the same letter of two characters
    "\u0430".encode(),  # Cyrillic
    b"[UNK]",
    b"-1",
    b"x" * (1 << 20),
    b"x" * ((1 << 20) - 1) + b"y",
    b"'; DROP TABLE users; --",
    b"\n",
    b'"\\',
]
LONG = [bytes([97 + size % 26]) * size for size in range(2, 140)]
STRINGS = [*HOSTILE, *(name for name in LONG if name not in HOSTILE)]
INTEGERS = [0, 1, -2, 2**63 - 1, -(2**63), 2**53 + 1, 2**53, *range(1000, 1100), *range(-(10**12), -(10**12) + 40)]
NAMES: Mapping[str, list[Any]] = {"string": STRINGS, "int64": INTEGERS}
UNKNOWN: Mapping[str, list[Any]] = {
    "string": [b"b\0", b"XX", b"\xff", b"x" * (1 << 20) + b"x", b"[unk]", b"aa\0"],
    "int64": [2, -3, 2**53 + 2, 2**62, -(2**63) + 1],
}
PADDING: Mapping[str, Any] = {"string": b"", "int64": -1}


def config(vocabulary: Vocabulary, policy: Any = None) -> ServingConfig:
    options: dict[str, Any] = {"table": "users", "vocabulary": vocabulary, "out_of_vocabulary": policy}
    return ServingConfig(
        features={
            "one": ServingFeature(input="id", **options),
            "list": ServingFeature(combiner="sum", **options),
            "weighted": ServingFeature(combiner="mean", weighted=True, **options),
            "last": ServingFeature(max_sequence_length=2, **options),
            "row": ServingFeature(table="users", input="id"),
        }
    )


def request(dtype: str, known: list[Any], unknown: list[Any], seed: int = 0, batch: int = 37) -> dict[str, Array]:
    """Return random names for each feature; `unknown` ones too."""
    random = np.random.default_rng(seed)
    kind = object if dtype == "string" else np.int64
    pool = np.array([*known, *unknown, *unknown], kind)

    def pick(*shape: int) -> Array:
        return pool[random.integers(0, len(pool), shape)]

    lists = pick(batch, 5)
    lists[random.random(lists.shape) < 0.3] = PADDING[dtype]
    return {
        "one": pick(batch),
        "list": lists,
        "weighted": pick(batch, 3),
        "weighted_weights": random.random((batch, 3)).astype(np.float32),
        "last": pick(batch, 4),
        "row": random.integers(0, ROWS, batch),
    }


def expected(values: Array, inputs: Mapping[str, Array], rows_of: Any) -> dict[str, Array]:
    """Return the activations by numpy. `rows_of` returns the row of a name; None for padding, and -1 for zeros."""

    def rows(name: Any) -> Array:
        row = rows_of(name)
        return np.zeros(DIM, np.float32) if row is None or row < 0 else values[row]

    def each(names: Array) -> Array:
        return np.array([[rows(name) for name in line] for line in names.tolist()])

    present = np.array([[rows_of(name) is not None for name in line] for line in inputs["weighted"].tolist()])
    weights = inputs["weighted_weights"] * present
    return {
        "one": np.array([rows(name) for name in inputs["one"].tolist()]),
        "list": each(inputs["list"]).sum(1),
        "weighted": (each(inputs["weighted"]) * weights[..., None]).sum(1) / weights.sum(1)[:, None],
        "last": each(inputs["last"])[:, :2],
        "row": values[inputs["row"]],
    }


def _manifest(version: Path) -> Manifest:
    found = Manifest.read(version)
    assert found is not None
    return found


def check(version: Path, inputs: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
    found = signature(version)(inputs)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def signature(version: Path, name: str = "serving_default") -> Any:
    loaded = tf.saved_model.load(str(version))

    def call(inputs: Mapping[str, Array]) -> dict[str, Array]:
        given = {key: tf.constant(value.tolist() if value.dtype == object else value) for key, value in inputs.items()}
        return {key: value.numpy() for key, value in loaded.signatures[name](**given).items()}

    return call


def export(folder: Path, values: Array, served: ServingConfig, name: str = "m", **options: Any) -> Path:
    write_checkpoint(folder / "ckpt", {"users": values})
    report = export_saved_model(folder / "ckpt", folder / name, serving_config=served, **options)
    path: Path = report.path
    return path


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["variables", "mmap"])
@pytest.mark.parametrize("buckets", [0, 3])
@pytest.mark.parametrize("dtype", ["string", "int64"])
def test_rows_are_those_of_a_dictionary(tmp_path: Path, dtype: Any, buckets: int, layout: str) -> None:
    vocabulary = Vocabulary(NAMES[dtype], dtype=dtype, oov_buckets=buckets)
    values = random_table(ROWS, DIM)
    version = export(tmp_path, values, config(vocabulary, "zeros"), layout=layout)
    rows = {name: buckets + number for number, name in enumerate(NAMES[dtype])}
    if buckets:
        layer = (
            keras.layers.StringLookup(vocabulary=[*STRINGS[12:], b"z"], num_oov_indices=buckets, encoding="latin-1")
            if dtype == "string"
            else keras.layers.IntegerLookup(vocabulary=[5], num_oov_indices=buckets)
        )
        found = np.array(layer(tf.constant(UNKNOWN[dtype]))).tolist()
        rows |= dict(zip(UNKNOWN[dtype], found, strict=True))
        assert set(found) <= set(range(buckets))
        assert len(set(found)) > 1
    inputs = request(dtype, NAMES[dtype], UNKNOWN[dtype])
    check(
        version, inputs, expected(values, inputs, lambda name: rows.get(name, None if name == PADDING[dtype] else -1))
    )
    manifest = _manifest(version)
    assert json.loads((version / "assets.extra" / "tpuembed.json").read_text())["requires"] == ["names"]
    (entry,) = manifest.names
    assert (entry.table, entry.dtype, entry.count, entry.oov_buckets) == (
        "users",
        dtype,
        len(rows) - len(UNKNOWN[dtype]) * bool(buckets),
        buckets,
    )
    assert {one.name: one.names for one in manifest.features} == {
        **dict.fromkeys(("one", "list", "weighted", "last"), dtype),
        "row": "",
    }
    assert not verify_files(version).damaged


@pytest.mark.nightly
def test_a_salt_is_used(tmp_path: Path) -> None:
    def colliding(names: Any, salt: bytes) -> Any:
        return fingerprints(names, salt) % (BUCKETS if salt else 9)

    values = random_table(ROWS, DIM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name_index, "fingerprints", colliding)
        version = export(tmp_path, values, config(Vocabulary(STRINGS), "zeros"), layout="mmap")
    inputs = request("string", STRINGS, UNKNOWN["string"])
    rows = {name: number for number, name in enumerate(STRINGS)}
    check(version, inputs, expected(values, inputs, lambda name: rows.get(name, None if name == b"" else -1)))
    assert _manifest(version).names[0].salt


# ---- versions


def names_of(count: int, start: int = 0) -> list[str]:
    return [f"name {number}" for number in range(start, start + count)]


def answers(version: Path, names: list[str]) -> Array:
    found: Array = signature(version)({"one": np.array([name.encode() for name in names], object)})["one"]
    return found


def only_one(names: list[str], policy: Any = "zeros") -> ServingConfig:
    features = {
        "one": ServingFeature(table="users", input="id", vocabulary=Vocabulary(names), out_of_vocabulary=policy)
    }
    return ServingConfig(features=features)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["variables", "mmap"])
def test_an_overlay_has_names_of_its_own(tmp_path: Path, layout: str) -> None:
    """A name's row differs from the base's: an overlay with the base's index would answer wrong rows."""
    values = random_table(ROWS, DIM)
    before, after = names_of(50), [*reversed(names_of(50)), *names_of(200, 50)]
    export(tmp_path, values, only_one(before), layout=layout)
    values[7] += 1
    overlay = export(tmp_path, values, only_one(after), layout=layout, base="latest")
    assert _manifest(overlay).base is not None
    compacted = compact_version(tmp_path / "m", int(overlay.name)).path
    again = rollback_version(tmp_path / "m", int(overlay.name)).path
    for version in (overlay, compacted, again):
        assert not verify_files(version).damaged, version
        np.testing.assert_array_equal(answers(version, [*after, "no"])[:-1], values[: len(after)])
        assert not answers(version, ["no"]).any()
    shutil.rmtree(tmp_path / "m" / "1" / "names", ignore_errors=True)  # nothing needs the base's
    np.testing.assert_array_equal(answers(overlay, after), values[: len(after)])
    if layout == "mmap":
        assert not (overlay / "assets.extra" / "full" / "names").exists()


def test_damage_to_names_is_found(tmp_path: Path) -> None:
    version = export(tmp_path, random_table(ROWS, DIM), only_one(names_of(50)), layout="mmap")
    path = version / "names" / "0.keys"
    content = bytearray(path.read_bytes())
    content[17] ^= 1
    path.write_bytes(content)
    (damage,) = verify_files(version).damaged
    assert damage.file.endswith("names/0.keys")
    path.write_bytes(content[:-8])
    manifest = _manifest(version)
    ((file, _),) = size_faults(version, manifest)
    assert file == "names/0.keys"
    path.unlink()
    assert verify_files(version).damaged


def test_a_manifest_with_names_is_checked(tmp_path: Path) -> None:
    version = export(tmp_path, random_table(ROWS, DIM), only_one(names_of(50)), layout="mmap")
    manifest = _manifest(version)
    (entry,) = manifest.names
    with refused(ConfigError):
        dataclasses.replace(manifest, names=())
    with refused(ConfigError):
        dataclasses.replace(manifest, names=(dataclasses.replace(entry, dtype="int64"),))
    with refused(ConfigError):
        dataclasses.replace(manifest, names=(dataclasses.replace(entry, table="others"), entry))
    with refused(ConfigError):
        dataclasses.replace(manifest, names=(entry, entry))
    with refused(ConfigError):
        dataclasses.replace(entry, dtype="float32")
    with refused(ConfigError):
        keys, numbers = entry.arrays
        dataclasses.replace(entry, arrays=(keys, dataclasses.replace(numbers, size=4)))
