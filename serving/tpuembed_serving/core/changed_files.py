"""Notices changes of files that a running server reads again: API keys and certificates."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tpuembed.errors import ConfigError
from tpuembed_serving.core.log_once import ONCE

__all__ = ["follow_files"]

_SECONDS: Final = 1.0
_log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int] | None, ...]


async def follow_files(paths: Sequence[Path], read: Callable[[], str]) -> None:
    """Call `read` after each change of the files at `paths`, until cancelled. It returns the line to log.

    A change counts once the files have stayed the same for a second, so that a file is not read half-written, nor a
    certificate without its key. If `read` raises ConfigError, the error is logged, and the next change is waited for.
    """
    read_stamp = seen = await asyncio.to_thread(_stamp, paths)
    while True:
        await asyncio.sleep(_SECONDS)
        before, seen = seen, await asyncio.to_thread(_stamp, paths)
        if seen == read_stamp or seen != before:
            continue
        read_stamp = seen
        try:
            _log.info(await asyncio.to_thread(read), extra=ONCE)
        except ConfigError as error:
            _log.error("%s. What was read before stays in use", error, extra=ONCE)


def _stamp(paths: Sequence[Path]) -> Stamp:
    """Return size, time of change and inode of each file; None for a file that is not there."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(found)
