"""Makes the import of TensorFlow safe and silent: one thread at a time, without a folder for temporary files.

Two threads that import different modules of it first deadlock on their import locks.
"""

import os
import sys
import tempfile
import threading
from typing import Final

__all__ = ["IMPORTING_TENSORFLOW"]


class _Import:
    """A lock. While it is held for TensorFlow's first import, file descriptor 2 leads nowhere.

    TensorFlow writes notes to it before its log level applies. The server's log has a descriptor of its own. A variable
    TF_CPP_MIN_LOG_LEVEL below 3 shows the notes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stderr: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        if "tensorflow" not in sys.modules and os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "3":
            self._stderr = os.dup(2)
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 2)

    def __exit__(self, *_: object) -> None:
        if self._stderr is not None:
            os.dup2(self._stderr, 2)
            os.close(self._stderr)
            self._stderr = None
        self._lock.release()


IMPORTING_TENSORFLOW: Final = _Import()
"""Held around every import outside the main thread that may be the first of TensorFlow."""


def _need_no_temporary_folder() -> None:
    """Set TEST_TMPDIR if no temporary folder exists. absl's testing module, which TensorFlow imports, fails without it."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        os.environ.setdefault("TEST_TMPDIR", os.curdir)


_need_no_temporary_folder()
