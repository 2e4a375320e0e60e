"""describe, head, diff, verify, stats and relocate, on a checkpoint and on an export of it, against numpy."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.contract_command import json_of, tpuembed
from tests.support.contract_lookups import FEATURES, SHAPES, Lookups, answers
from tpuembed import export_saved_model

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def mapped(lookups: Lookups, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export of layout mmap with rows of int8."""
    config = {"features": {"user": {"table": "users", "input": "id"}}}
    options: dict[str, Any] = {"serving_config": config, "layout": "mmap", "storage": "int8", "workers": 1}
    return export_saved_model(lookups.prefix, tmp_path_factory.mktemp("mapped") / "m", **options).path


# ---- describe


def test_describe_a_checkpoint(lookups: Lookups) -> None:
    found = json_of("describe", lookups.prefix)
    assert found["path"] == str(lookups.prefix)
    assert found["format"]
    tables = {table["name"]: table for table in found["tables"]}
    assert tables.keys() == SHAPES.keys()
    for name, (rows, dim) in SHAPES.items():
        facts = {"name": name, "rows": rows, "dim": dim, "dtype": "float32", "slots": ["accumulators"]}
        assert facts.items() <= tables[name].items()
    shown = tpuembed("describe", lookups.prefix).stdout
    assert all(word in shown for word in ("users", "videos", "50", "40", "float32", "accumulators"))


def test_describe_an_export(lookups: Lookups, mapped: Path) -> None:
    found = json_of("describe", lookups.model_dir)
    assert {(table["name"], table["rows"], table["dim"]) for table in found["tables"]} == {
        (name, *shape) for name, shape in SHAPES.items()
    }
    signatures = found["signatures"]
    assert set(signatures) >= {"serving_default", "serving_examples"}
    inputs = signatures["serving_default"]["inputs"]
    assert inputs["user"] == {"dtype": "int64", "shape": [None]}
    assert inputs["rated_weights"] == {"dtype": "float32", "shape": [None, None]}
    assert signatures["serving_default"]["outputs"]["history"] == {"dtype": "float32", "shape": [None, 3, 6]}
    assert signatures["serving_default"]["outputs"].keys() == FEATURES.keys()
    (table,) = json_of("describe", mapped)["tables"]
    assert (table["name"], table["storage"]) == ("users", "int8")


# ---- head


def test_head_prints_every_value(lookups: Lookups, mapped: Path) -> None:
    users = lookups.rows["users"]
    for path in (lookups.prefix, lookups.model_dir, lookups.version):
        found = json_of("head", path, "users", "--rows", "47:50")
        assert (found["table"], found["start"], found["dtype"]) == ("users", 47, "float32")
        np.testing.assert_array_equal(np.array(found["values"], np.float32), users[47:50])
    assert len(json_of("head", lookups.prefix, "users")["values"]) == 5
    coded = np.array(json_of("head", mapped, "users", "--rows", "0:50")["values"])
    assert np.abs(coded - users).max() <= (users.max(1) - users.min(1)).max() / 508 * 1.0001
    # Adagrad's accumulators start at 0.1.
    slots = json_of("head", lookups.prefix, "users", "--slot", "accumulators", "--rows", ":2")["values"]
    np.testing.assert_array_equal(np.array(slots, np.float32), np.full((2, 4), 0.1, np.float32))
    lines = tpuembed("head", lookups.prefix, "users", "--rows", "1:3").stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["1", "2"]
    assert np.array(lines[0].split()[1:], np.float32).tolist() == users[1].tolist()


# ---- diff


def _write(folder: Path, **tables: Array) -> Path:
    folder.mkdir()
    variables = {name: tf.Variable(rows) for name, rows in tables.items()}
    return Path(tf.train.Checkpoint(**variables).write(str(folder / "ckpt")))


def test_diff_of_a_checkpoint_and_its_export(lookups: Lookups) -> None:
    found = json_of("diff", lookups.prefix, lookups.version)
    assert (found["added"], found["removed"]) == ([], [])
    assert {table["name"]: (table["rows_compared"], table["rows_changed"]) for table in found["tables"]} == {
        "users": (50, 0),
        "videos": (40, 0),
    }


def test_diff_counts_the_rows_that_changed(tmp_path: Path) -> None:
    before = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    after = before.copy()
    after[[5, 40]] += np.array([[0.5], [2.0]], np.float32)
    after[7, 1] = np.nan
    one = _write(tmp_path / "a", same=np.ones((2, 2), np.float32), items=before, old=np.ones((1, 1), np.float32))
    other = _write(tmp_path / "b", same=np.ones((2, 2), np.float32), items=after, new=np.ones((1, 1), np.float32))
    found = json_of("diff", one, other)
    assert (found["differs"], found["added"], found["removed"]) == (True, ["new"], ["old"])
    tables = {table["name"]: table for table in found["tables"]}
    assert tables["same"]["rows_changed"] == 0
    assert (tables["items"]["rows_changed"], tables["items"]["rows_nan"]) == (3, 1)
    assert tables["items"]["largest_abs"] == {"row": 40, "by": pytest.approx(2, rel=1e-6)}
    assert tables["items"]["largest_l2"] == {"row": 40, "by": pytest.approx(2 * 3**0.5, rel=1e-6)}
    assert json_of("diff", one, one)["differs"] is False
    shown = tpuembed("diff", one, other)
    assert (shown.returncode, "3 of 60" in shown.stdout) == (0, True)


# ---- verify


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_verify_finds_one_flipped_bit(lookups: Lookups, tmp_path: Path, kind: str) -> None:
    source = lookups.prefix.parent if kind == "checkpoint" else lookups.version
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    path = copy / lookups.prefix.name if kind == "checkpoint" else copy
    assert json_of("verify", path)["damaged"] == []
    assert tpuembed("verify", path).returncode == 0
    row = lookups.rows["videos"][7].tobytes()
    (file,) = (one for one in copy.glob("**/*data-*") if row in one.read_bytes() and "rec" not in one.parts)
    content = bytearray(file.read_bytes())
    content[content.index(row) + 3] ^= 0x40
    file.write_bytes(content)
    done = tpuembed("verify", path)
    assert done.returncode == 1
    assert str(file) in done.stdout
    assert done.stderr.splitlines()[-1].startswith(f"Error: {path}: 1 of ")
    assert tpuembed("verify", path, "--json").returncode == 1


# ---- stats


def test_stats_are_those_of_numpy(tmp_path: Path) -> None:
    rows = np.random.default_rng(2).normal(size=(500, 8)).astype(np.float32)
    rows[9] = 0
    broken = rows.copy()
    broken[[7, 30], 0] = np.nan
    broken[11, 3] = np.inf
    prefix = _write(tmp_path / "a", items=rows, broken=broken)
    (table,) = json_of("stats", prefix, "items", "--html", tmp_path / "page.html")["tables"]
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    assert (table["name"], table["rows"], table["dim"], table["zero_rows"]) == ("items", 500, 8, 1)
    assert (table["nan"]["count"], table["infinite"]["count"]) == (0, 0)
    for name, value in (("min", norms.min()), ("max", norms.max()), ("mean", norms.mean())):
        assert table["norms"][name] == pytest.approx(value, rel=1e-5), name
    assert table["norms"]["percentiles"]["50"] == pytest.approx(np.percentile(norms, 50), rel=0.01)
    assert "<html" in (tmp_path / "page.html").read_text().lower()
    found = {one["name"]: one for one in json_of("stats", prefix)["tables"]}
    assert found.keys() == {"items", "broken"}
    assert found["broken"]["nan"] == {"count": 2, "first": [7, 30]}
    assert found["broken"]["infinite"] == {"count": 1, "first": [11]}


# ---- relocate


def test_relocate_an_export_that_moved(lookups: Lookups, mapped: Path, tmp_path: Path) -> None:
    wanted = answers(mapped, {"user": [0, 49]})["user"]
    moved = Path(shutil.copytree(mapped, tmp_path / "first" / "1")).parent
    moved = moved.rename(tmp_path / "second")
    content = (moved / "1" / "saved_model.pb").read_bytes()
    assert str(mapped).encode() in content
    json_of("relocate", moved, moved)
    content = (moved / "1" / "saved_model.pb").read_bytes()
    assert str(mapped).encode() not in content
    assert str(moved).encode() in content
    np.testing.assert_array_equal(answers(moved / "1", {"user": [0, 49]})["user"], wanted)


# ---- what is wrong


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("describe", "{tmp}/none"), ["{tmp}/none"]),
        (("verify", "{tmp}/none"), ["{tmp}/none"]),
        (("diff", "{ckpt}", "{tmp}/none"), ["{tmp}/none"]),
        (("stats", "{ckpt}", "video"), ["'video'", "'videos'"]),
        (("head", "{ckpt}", "user"), ["'user'", "'users'"]),
        (("head", "{ckpt}", "users", "--rows", "0:51"), ["[0, 51)", "50"]),
        (("head", "{ckpt}", "users", "--slot", "momenta"), ["'momenta'", "users"]),
        (("relocate", "{ckpt}", "/srv/m"), ["{ckpt}"]),
    ],
    ids=lambda value: " ".join(value[:1] + value[2:]) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_line_and_exits_with_1(
    lookups: Lookups, tmp_path: Path, arguments: tuple[str, ...], words: list[str]
) -> None:
    places = {"tmp": tmp_path, "ckpt": lookups.prefix}
    line = tpuembed(*(argument.format(**places) for argument in arguments)).refused()
    assert all(word.format(**places) in line for word in words), line


def test_bad_usage_exits_with_2(lookups: Lookups) -> None:
    for arguments in (("describe",), ("head", lookups.prefix), ("diff", lookups.prefix), ("stats", "--no-such-option")):
        assert tpuembed(*arguments).returncode == 2, arguments
    for rows in ("5", "5:", "a:b", "-1:5"):
        assert tpuembed("head", lookups.prefix, "users", "--rows", rows).returncode == 2, rows
