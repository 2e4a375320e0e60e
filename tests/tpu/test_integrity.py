"""Environments are trusted only where their files are those of their wheels: shown on made-up RECORDs."""

import base64
import hashlib
from pathlib import Path

import pytest

from tests.tpu.integrity import overwritten_files, problems

FILES = {
    "tensorflow/__init__.py": b"version = 1\n",
    "tensorflow/libtensorflow_cc.so.2": b"\x7fELF of the TPU's\n" * 1000,
}
PINS = {"tensorflow-tpu": "2.19.1"}


def install(folder: Path, name: str, files: dict[str, bytes], version: str = "2.19.1") -> None:
    """As pip does: files, and a RECORD of them."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = []
    for path, data in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}\n")
    (info / "RECORD").write_text("".join([*lines, f"{info.name}/RECORD,,\n", "tensorflow/__pycache__/x.pyc,,\n"]))


def test_a_second_tensorflow_overwrites_the_first(tmp_path: Path) -> None:
    install(tmp_path, "tensorflow-tpu", FILES)
    install(tmp_path, "tensorflow", {"tensorflow/libtensorflow_cc.so.2": b"\x7fELF of the CPU's\n" * 1000})
    assert problems(tmp_path, PINS) == [
        "tensorflow is installed beside tensorflow-tpu and overwrites its files",
        "tensorflow-tpu: tensorflow/libtensorflow_cc.so.2 is not the file of its RECORD",
    ]


def test_an_overwriter_that_was_uninstalled_leaves_its_files(tmp_path: Path) -> None:
    install(tmp_path, "tensorflow-tpu", FILES)
    (tmp_path / "tensorflow/__init__.py").write_bytes(b"version = 2\n")  # of the same length
    assert overwritten_files(tmp_path, "tensorflow-tpu") == ["tensorflow/__init__.py"]


@pytest.mark.parametrize("there", [{}, {"libtpu": {"libtpu/libtpu.so": b"1"}}])
def test_nothing_to_trust(tmp_path: Path, there: dict[str, dict[str, bytes]]) -> None:
    for name, files in there.items():
        install(tmp_path, name, files)
    assert problems(tmp_path, PINS) == [f"tensorflow-tpu is not installed in {tmp_path}"]


def test_every_pinned_distribution_is_looked_at(tmp_path: Path) -> None:
    install(tmp_path, "tensorflow-tpu", FILES)
    install(tmp_path, "ml_dtypes", {"ml_dtypes/__init__.py": b"1\n"}, "0.6.0")
    pins = {**PINS, "ml_dtypes": "0.6.0"}
    assert problems(tmp_path, pins) == []
    (tmp_path / "ml_dtypes/__init__.py").write_bytes(b"2\n")
    assert problems(tmp_path, pins) == ["ml-dtypes: ml_dtypes/__init__.py is not the file of its RECORD"]
    assert problems(tmp_path, {**PINS, "ml_dtypes": "0.7.0"}) == ["ml-dtypes is of version 0.6.0, not 0.7.0"]
