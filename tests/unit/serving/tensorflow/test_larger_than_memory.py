"""Mapped tables are compared with the memory at each load and unload, and what follows is set once for each change."""

import logging
import mmap
from pathlib import Path

import pytest

from tpuembed_serving.core.memory import MemoryLimit, own_bytes
from tpuembed_serving.tensorflow import larger_than_memory
from tpuembed_serving.tensorflow.larger_than_memory import MappedTables, MappedVersion

CONTAINER = "the control group (container)"


class Tables:
    """A process with 1000 bytes of memory, of which 400 are its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: MemoryLimit | None) -> None:
        self.tables = MappedTables(limit=lambda: limit, own=lambda: 400)
        self.calls: list[str] = []
        names = {mmap.MADV_RANDOM: "random", mmap.MADV_NORMAL: "normal"}

        def advise(files: tuple[Path, ...], advice: int) -> None:
            self.calls.append(f"{names[advice]} {' '.join(file.name for file in files)}")

        monkeypatch.setattr(larger_than_memory, "advise", advise)

    def add(self, *files: Path) -> MappedVersion:
        version = MappedVersion(files=files, set_reads_ahead=lambda on: self.calls.append(f"ahead {on}"))
        self.tables.add(version)
        return version

    def taken(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in "abc"]
    for path, size in zip(found, (500, 100, 1), strict=True):
        path.write_bytes(bytes(size))
    return found


def test_all_versions_count_together(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    process = Tables(monkeypatch, MemoryLimit(1000, CONTAINER))
    process.add(*files[:2])
    assert process.taken() == [], "600 bytes fit into the 600 that are left"
    assert not caplog.messages
    last = process.add(files[2])
    assert process.taken() == ["random a b", "ahead True", "random c", "ahead True"]
    [message] = caplog.messages
    assert message == (
        f"the loaded versions map 0.00 GiB of tables, and {CONTAINER} has 0.00 GiB of memory for them: readahead is off, and "
        "native lookups read all pages of a request at once"
    )
    assert caplog.records[0].fields == {"mapped_bytes": 601, "free_bytes": 600}  # type: ignore[attr-defined]
    process.tables.remap(last)
    assert process.taken() == ["random c"]
    process.tables.remove(last)
    assert process.taken() == ["normal a b", "ahead False"]
    assert caplog.messages[1].endswith("of memory for them: readahead is on again")
    process.tables.remap(last)
    process.tables.remove(last)
    assert process.taken() == []


def test_the_own_memory_is_that_without_files() -> None:
    before = own_bytes()
    held = bytes(bytearray(b"x" * (64 << 20)))
    assert (48 << 20) < own_bytes() - before < (200 << 20)
    del held
