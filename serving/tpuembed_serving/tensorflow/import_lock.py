"""TensorFlow is imported by one thread at a time: two that begin at different modules of it deadlock on their locks.

It is also imported where no folder for temporary files is: on a file system that is read-only all over.
"""

import os
import tempfile
import threading
from typing import Final

__all__ = ["IMPORTING_TENSORFLOW"]

IMPORTING_TENSORFLOW: Final = threading.Lock()
"""Held around an import that may be the first of TensorFlow, wherever that is not the main thread's."""


def _need_no_temporary_folder() -> None:
    """TensorFlow imports absl's testing module, which fails without a folder that it never writes to in a server."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        os.environ.setdefault("TEST_TMPDIR", os.curdir)


_need_no_temporary_folder()
