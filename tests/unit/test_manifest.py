"""A manifest that contradicts itself, or names what is not in the export, is refused whoever wrote it."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import refused
from tests.support.saved_model_graphs import FILES, manifest
from tpuembed.errors import ConfigError
from tpuembed.manifest import MANIFEST_PATH, BaseEntry, FileEntry, Manifest


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


def test_what_a_later_version_adds_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path)
    old = Manifest.read(tmp_path)

    def add(content: dict[str, Any]) -> None:
        for entry in (content, content["tables"][0], content["stacks"][0], content["files"]["saved_model.pb"]):
            entry["later"] = 1

    spoil(path, add)
    assert Manifest.read(tmp_path) == old


def test_only_what_readers_must_know_is_required(tmp_path: Path) -> None:
    assert json.loads(written(tmp_path).read_text())["requires"] == []
    overlay = dataclasses.replace(manifest("mmap"), base=BaseEntry(version=1, fingerprint="x"))
    overlay.write(tmp_path)
    assert json.loads((tmp_path / MANIFEST_PATH).read_text())["requires"] == ["base"]


GOLDEN = Path(__file__).parents[1] / "golden" / "exports" / "model" / "1"
INSIDE = ["/etc/passwd", "../1/x", "variables/../../x", "a/./b", "./a", "a//b", "a/", "", ".", "..", "a\0b", 5, None]


@pytest.mark.parametrize("file", INSIDE)
def test_a_file_must_be_inside_the_export(tmp_path: Path, file: Any) -> None:
    path = written(tmp_path)
    spoil(path, of_stack(file=file))
    with refused(ConfigError):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("file", [file for file in INSIDE if isinstance(file, str)])
def test_other_files_too(tmp_path: Path, file: str) -> None:
    spoil(written(tmp_path), lambda content: content["files"].update({file: {"size": 1, "crc32c": 1}}))
    with refused(ConfigError):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        of_stack(offset=-1),
        of_stack(offset=4),
        of_stack(file=FILES[1]),
        of_stack(size=44),
        of_stack(size=-48),
        of_stack(size=48.0),
        of_stack(rows=True),
        of_stack(rows=0),
        of_stack(rows=2**62, dim=2**62),
        of_stack(crc32c="7"),
        of_stack(storage="float64"),
        of_stack(storage="bfloat16"),
        of_stack(name="b"),
        of_stack(name="c"),
        of_table(row_offset=1),
        of_table(row_offset=-1),
        of_table(rows=2),
        of_table(rows=4),
        of_table(dim=5),
        of_table(quantization={"num_buckets": 1, "lower": 0.0, "upper": 1.0}),
        of_table(quantization={"num_buckets": 2, "lower": 1.0, "upper": 1.0}),
        of_table(quantization={"num_buckets": 2, "lower": 0.0, "upper": "1"}),
        of_table(quantization={"num_buckets": 2, "lower": 0.0}),
        of_table(quantization=[]),
        of_table(name="t_b"),
        lambda content: content["tables"].append(content["tables"][0] | {"name": "more"}),
        lambda content: content["tables"].pop(),
        lambda content: content.update(layout="paged"),
        lambda content: content.pop("files"),
        lambda content: content["files"]["saved_model.pb"].update(size=-3),
        lambda content: content.update(stacks=5),
        lambda content: content.update(format=9),
        lambda content: content.update(requires=["names", "tides"]),
        lambda content: content.pop("requires"),
        lambda content: content.pop("packing"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(tmp_path: Path, change: Any) -> None:
    path = written(tmp_path)
    spoil(path, change)
    with refused(ConfigError) as caught:
        Manifest.read(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"), [("name", "other"), ("ids", "age2"), ("weights", "w"), ("names", "string"), ("features", 7)]
)
def test_activations_are_of_inputs(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / MANIFEST_PATH
    path.parent.mkdir()
    path.write_text((GOLDEN / MANIFEST_PATH).read_text())
    found = Manifest.read(tmp_path)
    assert found is not None
    assert [one.name for one in found.from_activations.features] == ["user", "watched"]

    def change(content: dict[str, Any]) -> None:
        feature = content["from_activations"]["features"][1]
        if field == "features":
            content["from_activations"][field] = value
        else:
            feature |= {field: value, "weighted": field == "weights"}

    spoil(path, change)
    with refused(ConfigError):
        Manifest.read(tmp_path)


def test_stacks_that_overlap(tmp_path: Path) -> None:
    """Variables may share a file, and never a byte."""
    path = written(tmp_path, "variables")
    spoil(path, of_stack(file=FILES[1], offset=40))
    apart = Manifest.read(tmp_path)
    assert apart is not None
    assert apart.table_files() == {FILES[1]: 88}
    spoil(path, of_stack(offset=39))
    with refused(ConfigError):
        Manifest.read(tmp_path)


def test_an_int8_row_holds_its_scale_and_offset(tmp_path: Path) -> None:
    spoil(written(tmp_path), of_stack(storage="int8", size=3 * (4 + 8)))
    found = Manifest.read(tmp_path)
    assert found is not None
    assert found.stacks[0].storage == "int8"
