"""What the kernel says of a process' memory."""

from pathlib import Path

__all__ = ["GROWTH_BYTES", "mapped_bytes", "resident_bytes"]

GROWTH_BYTES = 150 << 20
"""What a server may have more after much use: threads' heaps that grow to their size, no leak."""


def resident_bytes(pid: int, kind: str = "VmRSS") -> int:
    """VmRSS: all pages that are there; RssAnon: those that are no file's; VmHWM: the most that there ever were."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))


def mapped_bytes(pid: int, folder: Path) -> tuple[int, int]:
    """Of the files below `folder` that a process has mapped: pages that are there, and its part of those that others share."""
    resident = share = 0
    below = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            below = bool(rest) and rest[-1].startswith(f"{folder}/")
        elif below and first == "Rss:":
            resident += int(rest[0]) * 1024
        elif below and first == "Pss:":
            share += int(rest[0]) * 1024
    return resident, share
