"""TensorFlow is imported by one thread at a time: two that begin at different modules of it deadlock on their locks."""

import threading
from typing import Final

__all__ = ["IMPORTING_TENSORFLOW"]

IMPORTING_TENSORFLOW: Final = threading.Lock()
"""Held around an import that may be the first of TensorFlow, wherever that is not the main thread's."""
