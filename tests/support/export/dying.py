"""Ends a process with SIGKILL before one certain change of a folder."""

import itertools
import os
import signal
import sys
from typing import Any

_CHANGES = {"open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"}
"""Audit events of Python: https://docs.python.org/3/library/audit_events.html."""


def die_at_change(folder: str, number: int) -> None:
    """Have this process killed before its `number`-th opening or change of something in `folder`.

    What is named relative to a descriptor counts too, as when a tree is removed.
    """
    changes = itertools.count(1)

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _CHANGES:
            return
        paths = [os.fspath(one) for one in arguments[:2] if isinstance(one, str | os.PathLike)]
        is_relative = event in ("os.remove", "os.rmdir") and arguments[-1] != -1
        if (is_relative or any(str(path).startswith(folder) for path in paths)) and next(changes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
