"""What the kernel says of a process' memory."""

from pathlib import Path

__all__ = ["GROWTH_BYTES", "resident_bytes"]

GROWTH_BYTES = 150 << 20
"""What a server may have more after much use: threads' heaps that grow to their size, no leak."""


def resident_bytes(pid: int, kind: str = "VmRSS") -> int:
    """VmRSS: all pages that are there; RssAnon: those that are no file's; VmHWM: the most that there ever were."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))
