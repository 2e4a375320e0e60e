"""How much memory the process may use: that of its control group, of those around it, or of the machine."""

from pathlib import Path

from tpuembed_serving.core.memory import MemoryLimit, memory_limit


def test_the_least_limit_of_a_group_and_those_around_it(tmp_path: Path) -> None:
    group = tmp_path / "own"
    group.write_text("0::/pod/container\n")
    root = tmp_path / "fs"
    (root / "pod" / "container").mkdir(parents=True)
    (root / "pod" / "container" / "memory.max").write_text("max\n")
    (root / "pod" / "memory.max").write_text("4096\n")
    assert memory_limit(group, root) == MemoryLimit(4096, "the control group (container)")
    (root / "pod" / "container" / "memory.max").write_text("1024\n")
    assert memory_limit(group, root) == MemoryLimit(1024, "the control group (container)")


def test_the_limit_of_a_group_of_the_first_version(tmp_path: Path) -> None:
    group = tmp_path / "own"
    group.write_text("5:cpu:/c\n4:memory:/c\n")
    (tmp_path / "memory" / "c").mkdir(parents=True)
    (tmp_path / "memory" / "c" / "memory.limit_in_bytes").write_text("2048\n")
    assert memory_limit(group, tmp_path) == MemoryLimit(2048, "the control group (container)")


def test_without_a_group_it_is_the_machine(tmp_path: Path) -> None:
    found = memory_limit(tmp_path / "missing", tmp_path)
    assert found is not None
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    assert (found.size, found.source) == (int(total.split()[1]) << 10, "the machine")
