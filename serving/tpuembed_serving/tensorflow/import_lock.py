"""Makes the import of TensorFlow safe: by one thread at a time, and without a folder for temporary files.

Two threads that import different modules of it first deadlock on their import locks.
"""

import os
import tempfile
import threading
from typing import Final

__all__ = ["IMPORTING_TENSORFLOW"]

IMPORTING_TENSORFLOW: Final = threading.Lock()
"""Held around every import outside the main thread that may be the first of TensorFlow."""


def _need_no_temporary_folder() -> None:
    """Set TEST_TMPDIR if no temporary folder exists. absl's testing module, which TensorFlow imports, fails without it."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        os.environ.setdefault("TEST_TMPDIR", os.curdir)


_need_no_temporary_folder()
