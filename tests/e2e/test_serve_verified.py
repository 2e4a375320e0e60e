"""A version that is not what was exported is refused by name: its sizes and its index always, every byte where asked for."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.export.fakes import random_table, write_checkpoint
from tpuembed import export_saved_model
from tpuembed.manifest import MANIFEST_PATH
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.models.verification import verify_checksums
from tpuembed_serving.models.versions import INDEX_FILE, check_files

SHAPES = {"a": (100, 4), "b": (50, 4), "c": (30, 8)}
CONFIG = {"features": {name: {"table": name, "combiner": "sum"} for name in SHAPES}}


@pytest.fixture(scope="module", params=[pytest.param("variables", marks=pytest.mark.nightly), "mmap"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verified")
    write_checkpoint(folder / "ckpt", {name: random_table(*shape, seed=1) for name, shape in SHAPES.items()})
    report = export_saved_model(folder / "ckpt", folder / "m", serving_config=CONFIG, layout=request.param, workers=1)
    return Path(str(report.path))


@pytest.fixture
def version(exported: Path, tmp_path: Path) -> Path:
    """A copy in another folder."""
    return Path(shutil.copytree(exported, tmp_path / "5"))


def nothing(_: int) -> None:
    pass


def files(version: Path) -> Iterator[Path]:
    return (path for path in sorted(version.rglob("*")) if path.is_file())


def test_a_version_that_was_copied_whole_is_read_and_accepted(version: Path) -> None:
    read: list[int] = []
    verify_checksums(version, read.append)
    tables = sum(rows * dim * 4 for rows, dim in SHAPES.values())
    assert sum(read) >= tables
    check_files(version)


def test_a_version_of_others_has_nothing_to_compare(version: Path) -> None:
    (version / MANIFEST_PATH).unlink()
    verify_checksums(version, nothing)


def test_a_flipped_bit_of_any_file_is_refused(version: Path) -> None:
    seen = set()
    for path in files(version):
        name = path.relative_to(version).as_posix()
        if name.startswith("assets.extra/"):
            continue
        whole = path.read_bytes()
        for at in np.linspace(0, len(whole) - 1, 5).astype(int).tolist() if whole else []:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            with pytest.raises(StatusError) as caught:
                verify_checksums(version, nothing)
            assert caught.value.code is Code.DATA_LOSS
            assert caught.value.message.startswith(f"version 5: {name}"), caught.value.message
            assert str(version) not in caught.value.message
        seen.add(name)
        path.write_bytes(whole)
    assert {"saved_model.pb", "variables/variables.index"} <= seen


def test_a_file_that_is_missing_or_of_another_size_is_refused_without_being_asked(version: Path) -> None:
    for path in files(version):
        name = path.relative_to(version).as_posix()
        if name.startswith("assets.extra/"):
            continue
        whole = path.read_bytes()
        path.unlink()
        with pytest.raises(StatusError, match=rf"^version 5: {name}"):
            check_files(version)
        if name != "saved_model.pb":
            path.write_bytes(whole + b"\0")
            with pytest.raises(
                StatusError, match=rf"^version 5: {name}.* has {len(whole) + 1} bytes, but the manifest"
            ):
                check_files(version)
        path.write_bytes(whole)


def test_a_folder_of_tflite_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.tflite").touch()
    with pytest.raises(StatusError, match="This server runs SavedModels, not TFLite models"):
        check_files(tmp_path)


def test_an_index_with_other_bytes_is_refused_without_being_asked(version: Path) -> None:
    index = version / INDEX_FILE
    whole = index.read_bytes()
    index.write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
    with pytest.raises(StatusError, match=r"^version 5: variables/variables.index has CRC32C 0x[0-9a-f]{8}, but"):
        check_files(version)


def test_requests_to_warm_up_with_may_be_replaced(version: Path) -> None:
    warmup = version / "assets.extra" / "tf_serving_warmup_requests"
    assert warmup.is_file()
    warmup.write_bytes(b"")
    verify_checksums(version, nothing)


def test_a_stop_while_a_table_is_read(version: Path) -> None:
    def stop(_: int) -> None:
        raise StatusError(Code.CANCELLED, "the server is stopping")

    with pytest.raises(StatusError, match=r"^the server is stopping$"):
        verify_checksums(version, stop)
