"""Vocabularies in checkpoints: what the readers return, and damaged ones."""

import struct
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from tests.support.checkpoint.named import named_layer, write_named, write_named_weights
from tests.support.layer.restored import Array, Tables
from tests.support.messages import refused
from tpuembed import Vocabulary
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import CheckpointCorruptError, UnknownTableError
from tpuembed.vocabulary import VocabularyHeader

HOSTILE: list[Any] = [b"", b"a/b", "ö".encode(), b"\xff\xfe", b"line\nend", b"\x1b[31mred", b"|", b"x" * 5000]


def _rows(rows: int, dim: int, *slots: str) -> dict[str | None, Array]:
    rng = np.random.default_rng(rows)
    return {slot: rng.normal(size=(rows, dim)).astype(np.float32) for slot in (None, *slots)}


TABLES: Tables = {"films": _rows(12, 3, "accumulators"), "users/v.1": _rows(6, 2), "plain": _rows(4, 2)}


def _vocabularies() -> dict[str, Vocabulary]:
    return {
        "films": Vocabulary(HOSTILE, oov_buckets=2),
        "users/v.1": Vocabulary([5, -7, 2**63 - 1, -(2**63)], dtype="int64"),
    }


def _write(path: Path, form: str, vocabularies: Any) -> str:
    layer = named_layer(TABLES)
    if form == "bundle":
        return write_named(path / "ckpt", layer, vocabularies)
    return write_named_weights(path / "model.weights.h5", layer, vocabularies)


@pytest.mark.parametrize("form", ["bundle", "weights"])
def test_vocabularies_are_read_back(tmp_path: Path, form: str) -> None:
    with open_checkpoint(_write(tmp_path, form, _vocabularies())) as checkpoint:
        assert set(checkpoint.tables()) == set(TABLES)
        films, users = checkpoint.vocabulary("films"), checkpoint.vocabulary("users/v.1")
        assert films is not None
        assert users is not None
        assert films.names(range(10)) == [None, None, *HOSTILE]
        assert users.names(range(4)) == [5, -7, 2**63 - 1, -(2**63)]
        assert checkpoint.vocabulary("plain") is None
        assert checkpoint.vocabularies["films"].header == VocabularyHeader(8, "string", 2)
        assert checkpoint.vocabularies["users/v.1"].header == VocabularyHeader(4, "int64", 0)
        assert "plain" not in checkpoint.vocabularies
        np.testing.assert_array_equal(checkpoint.read("films"), TABLES["films"][None])
        with pytest.raises(UnknownTableError):
            checkpoint.vocabulary("film")
        assert checkpoint.layers is not None
        assert not checkpoint.layers.objects(["films"]).weights()


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["bundle", "weights"])
def test_every_damaged_byte_is_noticed(tmp_path: Path, form: str) -> None:
    content = Vocabulary(["one", "two"], oov_buckets=1).to_bytes()
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 0x20
        path = tmp_path / str(place)
        path.mkdir()
        with (
            open_checkpoint(_write(path, form, {"films": bytes(damaged)})) as checkpoint,
            pytest.raises(CheckpointCorruptError),
        ):
            checkpoint.vocabulary("films")


def _sealed(header: str, body: bytes = b"") -> bytes:
    content = b"tpuembed vocabulary 1\n" + struct.pack("<I", len(header)) + header.encode() + body
    return content + struct.pack("<I", google_crc32c.value(content))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"tpuembed vocabulary 1\n", id="cut"),
        pytest.param(_sealed("{"), id="no-json"),
        pytest.param(_sealed("[]"), id="a-list"),
        pytest.param(_sealed("[" * 3000), id="nested"),
        pytest.param(_sealed('{"dtype": "float", "oov_buckets": 0, "names": 0}'), id="dtype"),
        pytest.param(_sealed('{"dtype": "string", "oov_buckets": -1, "names": 0}'), id="buckets"),
        pytest.param(_sealed('{"dtype": "string", "oov_buckets": 0, "names": -1}'), id="negative"),
        pytest.param(_sealed('{"dtype": "string", "oov_buckets": 0, "names": 3}', bytes(4)), id="few-lengths"),
        pytest.param(_sealed('{"dtype": "string", "oov_buckets": 0, "names": 2}', bytes(8)), id="twice"),
        pytest.param(_sealed('{"dtype": "int64", "oov_buckets": 0, "names": 2}', bytes(16)), id="number-twice"),
        pytest.param(_sealed('{"dtype": "int64", "oov_buckets": 0, "names": 2}', bytes(12)), id="cut-numbers"),
        pytest.param(
            _sealed('{"dtype": "string", "oov_buckets": 0, "names": 1}', struct.pack("<I", 9) + b"abc"), id="lengths"
        ),
        pytest.param(Vocabulary(range(12), dtype="int64", oov_buckets=1).to_bytes(), id="more-rows-than-the-table"),
    ],
)
def test_vocabularies_with_a_right_checksum_that_are_wrong(tmp_path: Path, content: bytes) -> None:
    path = _write(tmp_path, "bundle", {"films": content})
    with open_checkpoint(path) as checkpoint, refused(CheckpointCorruptError, match="films"):
        checkpoint.vocabulary("films")


@pytest.mark.parametrize("form", ["bundle", "weights"])
def test_a_vocabulary_of_no_table(tmp_path: Path, form: str) -> None:
    path = _write(tmp_path, form, {"film": Vocabulary(["a"])})
    with open_checkpoint(path) as checkpoint, refused(CheckpointCorruptError, match="film"):
        checkpoint.vocabulary("films")
