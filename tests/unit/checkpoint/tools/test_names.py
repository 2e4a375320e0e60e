"""describe, head and verify of tables whose rows have names, against dictionaries of rows by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.checkpoint.named import named_layer, write_named, write_named_weights
from tests.support.layer.restored import Array, Tables
from tests.support.messages import refused
from tpuembed import Vocabulary, export_saved_model
from tpuembed.checkpoint.tools import (
    head,
    read_rows,
    stream_named_rows,
    verify_files,
)
from tpuembed.errors import ConfigError
from tpuembed_cli.main import cli

HOSTILE: list[Any] = [
    "",
    "a b",
    "Ünïcode",
    b"\xff\x00",
    "line\nend",
    "\x1b[31mred",
    "\u202eevil",
    "back\\slash",
    "'quoted'",
]


def _rows(rows: int, dim: int, seed: int = 0) -> dict[str | None, Array]:
    rng = np.random.default_rng(seed)
    return {slot: rng.normal(size=(rows, dim)).astype(np.float32) for slot in (None, "accumulators")}


def _write(path: Path, names: list[Any], tables: Tables, oov_buckets: int = 0, **options: Any) -> str:
    vocabulary = Vocabulary(names, oov_buckets=oov_buckets, **options)
    return write_named(path, named_layer(tables), {"films": vocabulary})


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return _write(tmp_path / "ckpt", HOSTILE, {"films": _rows(12, 3), "plain": _rows(2, 2)}, 1)


def test_describe(prefix: str) -> None:
    said = CliRunner().invoke(cli, ["describe", prefix]).output
    assert "9 names, string, 1 oov_buckets" in said
    tables = json.loads(CliRunner().invoke(cli, ["describe", prefix, "--json"]).output)["tables"]
    assert tables[0]["vocabulary"] == {"names": 9, "dtype": "string", "oov_buckets": 1}
    assert "vocabulary" not in tables[1]


def test_head_prints_names_that_do_nothing_to_a_terminal(prefix: str) -> None:
    said = CliRunner().invoke(cli, ["head", prefix, "films", "--names", "--rows", "0:12"])
    assert said.exit_code == 0, said.output
    assert [line.partition(":")[0] for line in said.output.splitlines()] == [
        "0 -", "1 ''", "2 'a b'", "3 'Ünïcode'", "4 b'\\xff\\x00'", "5 'line\\nend'", "6 '\\x1b[31mred'",
        "7 '\\u202eevil'", "8 'back\\\\slash'", '9 "\'quoted\'"', "10 -", "11 -",
    ]  # fmt: skip


def test_head_in_json(prefix: str) -> None:
    said = CliRunner().invoke(cli, ["head", prefix, "films", "--names", "--rows", "0:12", "--json"])
    found = json.loads(said.output)
    texts = [{"b64": "/wA="} if isinstance(name, bytes) else name for name in HOSTILE]
    assert found["names"] == [None, *texts, None, None]
    assert len(found["values"]) == 12
    assert "names" not in json.loads(CliRunner().invoke(cli, ["head", prefix, "films", "--json"]).output)


def test_rows_by_name(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = dict(zip(HOSTILE, _rows(12, 3)[None][1:], strict=False))
    monkeypatch.setattr(head, "_PIECE_BYTES", 30)
    chosen = [*HOSTILE[::-2], "a b"]
    pieces = list(stream_named_rows(prefix, "films", chosen))
    assert len(pieces) == 3
    np.testing.assert_array_equal(np.concatenate([piece.values for piece in pieces]), [truth[name] for name in chosen])
    assert [number for piece in pieces for number in piece.numbers or ()] == [9, 7, 5, 3, 1, 2]
    said = CliRunner().invoke(cli, ["head", prefix, "films", "--name", "Ünïcode", "--name", "a b", "--json"])
    found = json.loads(said.output)
    assert (found["rows"], found["names"]) == ([3, 2], ["Ünïcode", "a b"])
    np.testing.assert_allclose(found["values"], [truth["Ünïcode"], truth["a b"]], rtol=1e-6)
    said = CliRunner().invoke(cli, ["head", prefix, "films", "--name", b"\xff\x00".decode("utf-8", "surrogateescape")])
    assert said.output.startswith("4 b'\\xff\\x00': ")
    slots = _rows(12, 3)["accumulators"]
    [rows] = stream_named_rows(prefix, "films", ["a b"], slot="accumulators")
    np.testing.assert_array_equal(rows.values, slots[[2]])
    assert CliRunner().invoke(cli, ["head", prefix, "films", "--name", "a", "--rows", "0:1"]).exit_code == 2


def test_names_that_are_integers(tmp_path: Path) -> None:
    tables = {"films": _rows(3, 2)}
    path = _write(tmp_path / "ckpt", [70, -1, 2**62], tables, dtype="int64")
    said = CliRunner().invoke(cli, ["head", path, "films", "--names"])
    assert [line.partition(":")[0] for line in said.output.splitlines()] == ["0 70", "1 -1", f"2 {2**62}"]
    [rows] = stream_named_rows(path, "films", ["-1", 70])
    np.testing.assert_array_equal(rows.values, tables["films"][None][[1, 0]])
    with refused(ConfigError, match="x"):
        list(stream_named_rows(path, "films", ["x"]))
    with refused(ConfigError, match="71"):
        list(stream_named_rows(path, "films", [71]))


def test_what_has_no_name(prefix: str, tmp_path: Path) -> None:
    export_saved_model(prefix, tmp_path / "m", serving_config={"features": {"f": {"table": "films", "input": "id"}}})
    with refused(ConfigError, match="export"):
        read_rows(str(tmp_path / "m" / "1"), "films", names=True)
    with refused(ConfigError, match="plain"):
        read_rows(prefix, "plain", names=True)
    with refused(ConfigError, match="nobody"):
        list(stream_named_rows(prefix, "films", ["a b", "nobody"]))


def test_verify_compares_the_checksum_of_names_and_their_rows(tmp_path: Path) -> None:
    def verified(content: bytes) -> list[str]:
        layer, folder = (
            named_layer({"films": _rows(4, 2), "others": _rows(3, 2)}),
            tmp_path / str(len(list(tmp_path.iterdir()))),
        )
        folder.mkdir()
        names: dict[str, Vocabulary | bytes] = {"films": content, "others": Vocabulary(["a"])}
        path = write_named_weights(folder / "model.weights.h5", layer, names)
        return [f"{damage.name}: {damage.reason}" for damage in verify_files(path).damaged]

    content = Vocabulary(["one", "two"], oov_buckets=1).to_bytes()
    assert verified(content) == []
    damaged = content.replace(b"two", b"TWO")
    [said] = verified(damaged)
    assert said.startswith("vocabulary of table 'films': ")
    assert "checksum is wrong" in said
    [said] = verified(Vocabulary(range(5), dtype="int64").to_bytes())
    assert "has 5 rows" in said
