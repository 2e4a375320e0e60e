"""A manifest that contradicts itself, or names what is not in the export, is refused whoever wrote it."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.saved_model_graphs import FILES, manifest
from tpuembed.errors import ConfigError
from tpuembed.manifest import MANIFEST_PATH, FileEntry, Manifest


def written(folder: Path, layout: str = "mmap") -> Path:
    whole = dataclasses.replace(manifest(layout), files={"saved_model.pb": FileEntry(size=3, crc32c=9)})
    whole.write(folder)
    assert Manifest.read(folder) == whole
    return folder / MANIFEST_PATH


def spoil(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def of_stack(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content["stacks"][0].update(fields)


def of_table(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content["tables"][0].update(fields)


def test_a_table_of_an_older_export_says_nothing_of_quantization(tmp_path: Path) -> None:
    spoil(written(tmp_path), lambda content: [table.pop("quantization") for table in content["tables"]])
    found = Manifest.read(tmp_path)
    assert found is not None
    assert {table.quantization for table in found.tables} == {None}


GOLDEN = Path(__file__).parents[1] / "golden" / "manifests"


@pytest.mark.parametrize("golden", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_manifests_of_every_date_are_read(golden: Path, tmp_path: Path) -> None:
    (tmp_path / MANIFEST_PATH).parent.mkdir()
    (tmp_path / MANIFEST_PATH).write_text(golden.read_text())
    found, text = Manifest.read(tmp_path), json.loads(golden.read_text())
    assert found is not None
    again = json.loads(json.dumps(dataclasses.asdict(found)))
    assert text == {"format": 1, **{name: again[name] for name in text if name != "format"}}


def test_what_a_later_version_adds_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path)
    old = Manifest.read(tmp_path)

    def add(content: dict[str, Any]) -> None:
        for entry in (content, content["tables"][0], content["stacks"][0], content["files"]["saved_model.pb"]):
            entry["later"] = 1

    spoil(path, add)
    assert Manifest.read(tmp_path) == old


INSIDE = ["/etc/passwd", "../1/x", "variables/../../x", "a/./b", "./a", "a//b", "a/", "", ".", "..", "a\0b", 5, None]


@pytest.mark.parametrize("file", INSIDE)
def test_a_file_must_be_inside_the_export(tmp_path: Path, file: Any) -> None:
    path = written(tmp_path)
    spoil(path, of_stack(file=file))
    with pytest.raises(ConfigError, match="is not a path inside the export"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("file", [file for file in INSIDE if isinstance(file, str)])
def test_other_files_too(tmp_path: Path, file: str) -> None:
    spoil(written(tmp_path), lambda content: content["files"].update({file: {"size": 1, "crc32c": 1}}))
    with pytest.raises(ConfigError, match="is not a path inside the export"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_stack(offset=-1), "offset must be an integer of at least .*, got -1"),
        (of_stack(offset=4), "is not the only content of"),
        (of_stack(file=FILES[1]), "is not the only content of"),
        (of_stack(size=44), r"float32 \[3, 4\] takes 48 bytes, not 44"),
        (of_stack(size=-48), "size must be an integer of at least .*, got -48"),
        (of_stack(size=48.0), r"size must be an integer of at least .*, got 48\.0"),
        (of_stack(rows=True), "rows must be an integer of at least .*, got True"),
        (of_stack(rows=0), "rows must be an integer of at least .*, got 0"),
        (of_stack(rows=2**62, dim=2**62), "takes"),
        (of_stack(crc32c="7"), "crc32c must be an integer of at least .*, got '7'"),
        (of_stack(storage="float64"), "unknown storage 'float64'"),
        (of_stack(storage="bfloat16"), "takes 24 bytes, not 48"),
        (of_stack(name="b"), "stack 'b' is listed twice"),
        (of_stack(name="c"), "is in stack 'a', which does not exist"),
        (of_table(row_offset=1), "starts at row 1 of 'a', not at 0"),
        (of_table(row_offset=-1), "row_offset must be an integer of at least .*, got -1"),
        (of_table(rows=2), "stack 'a' has 3 rows, but its tables have 2"),
        (of_table(rows=4), "stack 'a' has 3 rows, but its tables have 4"),
        (of_table(dim=5), "has width 5, but its stack 'a' has 4"),
        (of_table(quantization={"num_buckets": 1, "lower": 0.0, "upper": 1.0}), "num_buckets must be .*, got 1"),
        (of_table(quantization={"num_buckets": 2, "lower": 1.0, "upper": 1.0}), "lower must be less than"),
        (of_table(quantization={"num_buckets": 2, "lower": 0.0, "upper": "1"}), "two finite numbers"),
        (of_table(quantization={"num_buckets": 2, "lower": 0.0}), "upper"),
        (of_table(quantization=[]), "not a tpuembed manifest"),
        (of_table(name="t_b"), "table 't_b' is listed twice"),
        (lambda content: content["tables"].append(content["tables"][0] | {"name": "more"}), "starts at row 0 of 'a', not at 3"),
        (lambda content: content["tables"].pop(), "its tables have 0"),
        (lambda content: content.update(layout="paged"), "its layout is 'paged'"),
        (lambda content: content.pop("files"), "files"),
        (lambda content: content["files"]["saved_model.pb"].update(size=-3), "size must be an integer of at least .*, got -3"),
        (lambda content: content.update(stacks=5), "not a tpuembed manifest"),
        (lambda content: content.update(format=2), "its format is not 1"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = written(tmp_path)
    spoil(path, change)
    with pytest.raises(ConfigError, match=message) as caught:
        Manifest.read(tmp_path)
    assert str(path) in str(caught.value)


def test_stacks_that_overlap(tmp_path: Path) -> None:
    """Variables may share a file, and never a byte."""
    path = written(tmp_path, "variables")
    spoil(path, of_stack(file=FILES[1], offset=40))
    apart = Manifest.read(tmp_path)
    assert apart is not None
    assert apart.table_files() == {FILES[1]: 88}
    spoil(path, of_stack(offset=39))
    with pytest.raises(ConfigError, match=rf"stacks 'b' and 'a' overlap in {FILES[1]}"):
        Manifest.read(tmp_path)


def test_an_int8_row_holds_its_scale_and_offset(tmp_path: Path) -> None:
    spoil(written(tmp_path), of_stack(storage="int8", size=3 * (4 + 8)))
    found = Manifest.read(tmp_path)
    assert found is not None
    assert found.stacks[0].storage == "int8"
