"""Formats byte counts for people."""

__all__ = ["format_bytes"]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def format_bytes(count: int) -> str:
    """Format `count` bytes in decimal units with three significant digits: 999 B, 1.5 kB, 10 TB."""
    size = float(count)
    for unit in _UNITS:
        if size < 999.5 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{count} B" if unit == "B" else f"{size:.3g} {unit}"
