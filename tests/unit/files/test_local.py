"""Files of this machine."""

import io
import os
from pathlib import Path

import pytest

from tests.support.messages import refused
from tpuembed.files import open_bytes, open_stream, read_all, versions

DATA = os.urandom(5000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(DATA)
    return tmp_path / "file"


def test_exact_ranges(path: Path) -> None:
    file = open_bytes(path)
    for offset, size in [(0, 5000), (0, 0), (5000, 0), (17, 1), (4999, 1), (100, 3000)]:
        out = bytearray(size)
        file.read_into(offset, memoryview(out))
        assert out == DATA[offset : offset + size]
    outs = [bytearray(10), bytearray(20)]
    read_all([(file, [(30, memoryview(outs[0])), (5, memoryview(outs[1]))])])
    assert outs == [DATA[30:40], DATA[5:25]]
    read_all([(file, [(1, memoryview(outs[0]))]), (file, [(0, memoryview(outs[1]))])])
    assert outs == [DATA[1:11], DATA[:20]]
    file.close()
    file.close()


def test_an_early_end(path: Path) -> None:
    file = open_bytes(path)
    with refused(EOFError, match="5000, 3 bytes"):
        file.read_into(4990, memoryview(bytearray(13)))
    file.close()


def test_versions(path: Path) -> None:
    [first] = versions([path])
    file = open_bytes(path)
    assert first == file.version
    file.close()
    assert first.size == 5000
    os.utime(path, ns=(1, 1))
    assert versions([path])[0].tag == "1" != first.tag
    with pytest.raises(FileNotFoundError) as caught:
        versions([path, path.with_name("none")])
    assert caught.value.filename == str(path.with_name("none"))


def test_a_folder_is_named_in_the_error(tmp_path: Path) -> None:
    file = open_bytes(tmp_path)
    with pytest.raises(OSError, match="Is a directory") as caught:
        file.read_into(0, memoryview(bytearray(1)))
    assert caught.value.filename == str(tmp_path)
    file.close()


def test_a_stream(path: Path) -> None:
    with open_stream(path) as file:
        assert file.seek(-10, io.SEEK_END) == 4990
        assert file.read() == DATA[-10:]
