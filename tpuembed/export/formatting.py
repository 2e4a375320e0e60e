"""Formats byte counts and times for people."""

__all__ = ["format_bytes", "format_seconds"]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def format_bytes(count: int) -> str:
    """Format `count` bytes in decimal units with three significant digits: 999 B, 1.5 kB, 10 TB."""
    size = float(count)
    for unit in _UNITS:
        if size < 999.5 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{count} B" if unit == "B" else f"{size:.3g} {unit}"


def format_seconds(seconds: float) -> str:
    """Format `seconds` with two significant digits, in the best unit, and at least 0.1 s: 0.3 s, 45 s, 12 min, 5.6 h."""
    if seconds < 99.5:
        return f"{max(seconds, 0.1):.2g} s"
    return f"{seconds / 60:.2g} min" if seconds < 99.5 * 60 else f"{seconds / 3600:.3g} h"
