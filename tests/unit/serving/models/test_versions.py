"""Which folders are versions, and which versions are refused before they are loaded."""

from pathlib import Path

import pytest

from tests.support.messages import refused
from tests.support.serving.doubles import make_version
from tpuembed.manifest import FromActivations, Manifest, Packing, StackEntry, TableEntry
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.models.versions import check_files, find_versions, parse_version


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("1", 1), ("0", 0), ("00000123", 123), ("+5", 5), ("-5", -5), (" 7 ", 7),
        ("9223372036854775807", 2**63 - 1), ("9223372036854775808", None), ("9" * 5000, None),
        ("", None), ("v1", None), ("1.0", None), (".tmp-3", None), ("1_000", None), ("0x10", None), ("\u0663", None),
    ],
)  # fmt: skip
def test_a_version_is_a_name_that_reads_as_an_int64(name: str, version: int | None) -> None:
    assert parse_version(name) == version


def test_other_children_are_skipped(tmp_path: Path) -> None:
    for name in ("1", "00000010", ".staging-2", "latest"):
        make_version(tmp_path, name)
    assert find_versions(tmp_path) == {1: tmp_path / "1", 10: tmp_path / "00000010"}


def stack(size: int) -> StackEntry:
    return StackEntry(
        name="stack", key="k", rows=2, dim=2, storage="float32",
        file="variables/variables.data-00000-of-00001", offset=8, size=size, crc32c=0,
    )  # fmt: skip


def write_manifest(path: Path, size: int) -> None:
    table = TableEntry(name="t", rows=2, dim=2, dtype="float32", stack="stack", row_offset=0)
    Manifest(
        packing=Packing(left_out="none"),
        from_activations=FromActivations(left_out="none"),
        tool_version="0",
        source={},
        layout="variables",
        tables=(table,),
        stacks=(stack(size),),
        signatures={},
    ).write(path)


def test_what_a_manifest_names_must_be_there(tmp_path: Path) -> None:
    path = make_version(tmp_path, 5)
    write_manifest(path, size=16)
    data = path / "variables" / "variables.data-00000-of-00001"
    with refused(StatusError, match="stack 'stack'"):
        check_files(path)
    data.parent.mkdir()
    for size in (23, 25):
        data.write_bytes(b"\0" * size)
        with refused(StatusError, match=rf"{size} bytes"):
            check_files(path)
    data.write_bytes(b"\0" * 24)
    check_files(path)


def test_a_broken_manifest_is_refused_without_its_path(tmp_path: Path) -> None:
    path = make_version(tmp_path, 6)
    write_manifest(path, size=16)
    (path / "assets.extra" / "tpuembed.json").write_text("{", encoding="utf-8")
    with pytest.raises(StatusError) as caught:
        check_files(path)
    assert caught.value.message == (
        "version 6: assets.extra/tpuembed.json: not a tpuembed manifest: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1). Export it again"
    )
