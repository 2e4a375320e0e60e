"""verify and diff on checkpoints of many formats, against what their writers held."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from click.testing import CliRunner

from tests.support.goldens import BUNDLES, FOLDER, Golden, read_golden
from tpuembed.checkpoint.location import find_bundle
from tpuembed.formats.tensor_bundle import index_path, shard_path
from tpuembed_cli.main import cli


def run(code: int, *arguments: object, options: Mapping[str, Any] | None = None) -> Any:
    """What a command with --json prints; it exits with `code`."""
    words = [word for name, value in (options or {}).items() for word in ("--checkpoint-option", f"{name}={value}")]
    done = CliRunner().invoke(cli, [*map(str, arguments), *words, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_diff_of_two_formats_that_take_different_options(tmp_path: Path) -> None:
    """A TensorFlow 1 checkpoint, which needs one, against the same tables in a TensorFlow 2 checkpoint, which takes none."""
    golden = read_golden(BUNDLES["partitioned"])
    tables = {name: rows[None] for name, rows in golden.tables.items()}
    path = tmp_path / "plain"
    scope = tf.train.Checkpoint(emb=tf.Variable(tables["scope/emb"]))
    tf.train.Checkpoint(scope=scope, other=tf.Variable(tables["other"])).write(str(path))
    [(option, value)] = golden.options.items()
    for sides in ([golden.path, path, "--first-option"], [path, golden.path, "--second-option"]):
        found = run(0, "diff", *sides, f"{option}={value}")
        assert {table["name"]: table["rows_compared"] for table in found["tables"]} == {
            name: len(rows) for name, rows in tables.items()
        }
        assert found["differs"] is False
    refused = CliRunner().invoke(cli, ["diff", str(golden.path), str(path), "--checkpoint-option", f"{option}={value}"])
    assert (refused.exit_code, "Leave it out" in refused.stderr) == (1, True)
    twice = ["--checkpoint-option", f"{option}={value}", "--first-option", f"{option}={value}"]
    assert CliRunner().invoke(cli, ["diff", str(golden.path), str(path), *twice]).exit_code == 2


def test_diff_of_two_formats() -> None:
    """The same tables and slots, from SparseCores in one and in order in the other."""
    cores, saved_model = read_golden(BUNDLES["sparsecore"]), read_golden(BUNDLES["saved_model"])
    found = run(0, "diff", cores.path, saved_model.path, "--slots")
    assert found["differs"] is False
    assert sum(table["rows_compared"] for table in found["tables"]) == 3 * (20 + 67 + 3 + 33)
    hosts = read_golden(BUNDLES["tpu_v1"])
    found = run(0, "diff", hosts.path, cores.path)
    added = sorted(f"{table}/momenta" for table in cores.tables)
    assert (found["differs"], sorted(found["slots_added"]), found["slots_removed"]) == (True, added, [])


def copied(golden: Golden, name: str, folder: Path) -> tuple[Path, Path]:
    """A copy of a golden in a bundle, and its data file."""
    copy = Path(shutil.copytree(FOLDER / BUNDLES[name], folder / "copy"))
    path = copy / golden.path.relative_to(FOLDER / BUNDLES[name])
    prefix = find_bundle(path)
    assert isinstance(prefix, Path)
    assert index_path(prefix).is_file()
    return path, shard_path(prefix, 0, 1)


@pytest.mark.parametrize("name", BUNDLES)
def test_a_changed_row_is_found_by_verify_and_diff(name: str, tmp_path: Path) -> None:
    golden = read_golden(BUNDLES[name])
    path, data = copied(golden, name, tmp_path)
    table, slots = max(golden.tables.items())
    row = len(slots[None]) - 1
    damaged = bytearray(data.read_bytes())
    at = damaged.index(slots[None][row].tobytes())
    damaged[at + 2] ^= 1
    data.write_bytes(damaged)
    assert len(run(1, "verify", path)["damaged"]) == 1
    found = run(0, "diff", golden.path, path, options=golden.options)
    assert [
        (one["name"], one["rows_changed"], one["largest_abs"]["row"]) for one in found["tables"] if one["rows_changed"]
    ] == [(table, 1, row)]
