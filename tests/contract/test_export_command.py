"""`tpuembed export`: what it prints, what it publishes, and what it refuses."""

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import yaml

from tests.support.contract_command import json_of, tpuembed
from tests.support.contract_lookups import SHAPES, Lookups, answers, random_rows
from tests.support.serving.process import run_command
from tpuembed import export_saved_model
from tpuembed.errors import TpuEmbedError

IDS = {"features": {"user": {"table": "users", "input": "id"}, "video": {"table": "videos", "input": "id"}}}
TABLE_BYTES = sum(rows * dim * 4 for rows, dim in SHAPES.values())


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "serving.yaml"
    path.write_text(yaml.safe_dump(IDS))
    return path


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export") / "rec"


@pytest.fixture(scope="module")
def report(lookups: Lookups, config: Path, model_dir: Path) -> Any:
    """Return the object that an export prints, in a process of its own."""
    done = run_command("export", lookups.prefix, model_dir, "--serving-config", config, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


def test_json_has_the_facts_of_the_export(report: Any, model_dir: Path) -> None:
    assert (report["path"], report["version"]) == (str(model_dir / "1"), 1)
    assert sorted(report["tables"]) == ["users", "videos"]
    assert report["bytes_written"] == TABLE_BYTES
    assert report["seconds"] >= report["stream_seconds"] > 0
    # A Python process with numpy takes more than 10 MB, and one with TensorFlow more than 100 MB.
    assert 10_000_000 < report["worker_peak_rss_bytes"] < 200_000_000 < report["peak_rss_bytes"]
    assert report["base"] is None
    assert report["rows_changed"] is None


def test_the_version_is_all_that_is_published(report: Any, model_dir: Path, lookups: Lookups) -> None:
    assert [path.name for path in model_dir.iterdir()] == ["1"]
    assert (model_dir / "1" / "saved_model.pb").is_file()
    found = answers(model_dir / "1", {"user": [0, 49], "video": [39, 0]})
    np.testing.assert_array_equal(found["user"], lookups.rows["users"][[0, 49]])
    np.testing.assert_array_equal(found["video"], lookups.rows["videos"][[39, 0]])


def test_versions_count_up_and_an_existing_one_is_refused(report: Any, lookups: Lookups, model_dir: Path) -> None:
    def content() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in model_dir.rglob("*") if path.is_file()}

    before = content()
    line = tpuembed("export", lookups.prefix, model_dir, "--version", "1").refused()
    assert str(model_dir) in line
    assert "version 1 exists" in line
    assert content() == before
    (model_dir / "latest").mkdir()  # is not a version
    numbers = [
        export_saved_model(lookups.prefix, model_dir, serving_config=IDS, workers=1, version=version).version
        for version in (7, None)
    ]
    assert numbers == [7, 8]
    with pytest.raises(TpuEmbedError, match="version 7 exists"):
        export_saved_model(lookups.prefix, model_dir, serving_config=IDS, version=7)


def test_table_drops_the_features_of_other_tables_and_names_them(lookups: Lookups, tmp_path: Path) -> None:
    """Without a serving_config, the features are those of the layer: `user` and `watched`."""
    done = tpuembed("export", lookups.prefix, tmp_path / "m", "--table", "users", "--workers", "1", "--json")
    report = json.loads(done.stdout)
    assert (report["tables"], report["bytes_written"]) == (["users"], 50 * 4 * 4)
    (line,) = done.stderr.splitlines()
    assert "watched" in line
    found = answers(Path(report["path"]), {"user": [[3], [49]]})
    assert found.keys() == {"user"}
    np.testing.assert_array_equal(found["user"], lookups.rows["users"][[3, 49]])


def test_a_dry_run_prints_the_plan_and_writes_nothing(lookups: Lookups, config: Path, tmp_path: Path) -> None:
    options = ("export", lookups.prefix, tmp_path / "m", "--serving-config", config, "--dry-run")
    done = tpuembed(*options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "users: 50 rows" in done.stdout
    assert "videos: 40 rows" in done.stdout
    assert json_of(*options)["table_bytes"] == TABLE_BYTES
    assert not (tmp_path / "m").exists()
    places = [
        [int(number.replace(",", "")) for number in found]
        for found in re.findall(r"([\d,]+) rows from row ([\d,]+); bytes ([\d,]+) to ([\d,]+)", done.stdout)
    ]
    assert sum(rows for rows, *_ in places) == sum(rows for rows, _ in SHAPES.values())
    for rows, start, first, last in places:
        assert (last + 1 - first) * start == first * rows
        assert last + 1 - first in {rows * dim * 4 for _, dim in SHAPES.values()}


def test_a_checkpoint_is_a_file_of_it_or_a_directory_with_its_latest(tmp_path: Path) -> None:
    """Three steps are saved in one directory, each with different rows."""
    variable = tf.Variable(np.zeros((3, 2), np.float32))
    saver = tf.train.Checkpoint(items=variable)
    for step in (1, 2, 3):
        variable.assign(np.full((3, 2), step))
        saver.save(str(tmp_path / "checkpoints" / "ckpt"))
    config = {"features": {"item": {"table": "items", "input": "id"}}}
    for path, step in (("", 3), ("ckpt-2.index", 2)):
        options: dict[str, Any] = {"serving_config": config, "workers": 1}
        version = export_saved_model(tmp_path / "checkpoints" / path, tmp_path / "m", **options).path
        assert answers(version, {"item": [2]})["item"].tolist() == [[step, step]], path


@pytest.mark.parametrize("layout", ["variables", "mmap"])
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float16", "int8"])
def test_rows_are_stored_as_numpy_rounds_them(
    lookups: Lookups, tmp_path_factory: pytest.TempPathFactory, storage: str, layout: str
) -> None:
    started = time.monotonic()
    folder = tmp_path_factory.getbasetemp() / "storage"  # equal tables are shared by the versions of one folder
    report = export_saved_model(
        lookups.prefix, folder, serving_config=IDS, storage=storage, layout=layout, workers=1, max_memory_bytes=1 << 20
    )
    found = answers(report.path, {"user": np.arange(40), "video": np.arange(40)})
    size = {"float32": 4, "bfloat16": 2, "float16": 2}
    for name, rows in (("user", lookups.rows["users"][:40]), ("video", lookups.rows["videos"])):
        if storage == "int8":  # a row has 256 steps between its smallest and its largest value
            width = rows.max(1) - rows.min(1)
            assert (np.abs(found[name] - rows).max(1) <= width / 508 * 1.0001).all()
        else:
            stored = tf.cast(tf.cast(rows, storage), tf.float32)
            np.testing.assert_array_equal(found[name], stored)
    assert 0 < report.stream_seconds < report.seconds < time.monotonic() - started
    codes = sum(rows * (dim + 8) for rows, dim in SHAPES.values())
    assert report.bytes_written == (codes if storage == "int8" else TABLE_BYTES // 4 * size[storage])


def test_a_size_has_a_unit_or_is_a_number_of_bytes(lookups: Lookups, config: Path, tmp_path: Path) -> None:
    options = ("export", lookups.prefix, tmp_path / "m", "--serving-config", config, "--dry-run", "--max-memory")
    assert json_of(*options, "1MiB") == json_of(*options, "1048576") == json_of(*options, "1024KiB")


@pytest.mark.parametrize(
    "options",
    [
        ("--workers", "0"),
        ("--max-memory", "0"),
        ("--max-memory", "-512MiB"),
        ("--version", "0"),
        ("--version", "-3"),
        ("--storage", "float8"),
        ("--layout", "paged"),
        ("--no-such-option",),
    ],
    ids=" ".join,
)
def test_bad_usage_exits_with_2_and_writes_nothing(lookups: Lookups, tmp_path: Path, options: tuple[str, ...]) -> None:
    done = tpuembed("export", lookups.prefix, tmp_path / "m", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert options[0] in done.stderr.splitlines()[-1]
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("{tmp}/none {tmp}/m", ["{tmp}/none"]),
        ("{foreign} {tmp}/m", ["{foreign}", "--serving-config"]),
        ("{own} {tmp}/m --table user", ["'user'", "'users'"]),
        ("{own} {tmp}/m --serving-config {tmp}/none.yaml", ["{tmp}/none.yaml"]),
        ("{own} {tmp}/m --model no_such_module:build", ["no_such_module"]),
        ("{own} {tmp}/m --model build", ["MODULE:FACTORY"]),
        ("{own} {tmp}/file", ["{tmp}/file"]),
        ("{foreign} {tmp}/m --serving-config {tmp}/large.yaml --storage float16", ["'items'", "row 1"]),
    ],
)
def test_a_failure_is_one_line_and_exits_with_1(
    lookups: Lookups, tmp_path: Path, options: str, words: list[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "large.yaml").write_text("features: {x: {table: items, input: id}}")
    variables = tf.train.Checkpoint(items=tf.Variable([[1.0], [1e6]]))  # float16 ends at 65504
    places = {"tmp": tmp_path, "own": lookups.prefix, "foreign": variables.write(str(tmp_path / "ckpt"))}
    line = tpuembed("export", *options.format(**places).split()).refused()
    assert all(word.format(**places) in line for word in words), line
    assert not list(tmp_path.glob("m/[!.]*"))


def test_a_process_says_the_same(lookups: Lookups, tmp_path: Path) -> None:
    done = run_command("export", tmp_path / "none", tmp_path / "m")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == tpuembed("export", tmp_path / "none", tmp_path / "m").refused()


def test_rows_of_a_seed_are_not_zeros() -> None:
    """Guards the tests of this folder: equal or empty rows would pass most of them."""
    rows = np.concatenate([table[:, :4] for table in random_rows().values()])
    assert len(np.unique(rows, axis=0)) == len(rows)
