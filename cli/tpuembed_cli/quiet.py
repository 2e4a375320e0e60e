"""Imports TensorFlow without its start-up messages, which would mix with a command's lines on stderr.

They are written before TensorFlow's log level applies, directly to file descriptor 2.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

from tpuembed.errors import MissingExtraError

__all__ = ["import_tensorflow", "stdout_on_stderr"]


def import_tensorflow(*, verbose: bool = False) -> None:
    """Import TensorFlow. `verbose` shows its messages, at the import and later.

    Raises:
        MissingExtraError: it is not installed.
    """
    if "tensorflow" in sys.modules:
        return
    if verbose:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
    sys.stderr.flush()
    with tempfile.TemporaryFile() as notices, _redirected(2, 2 if verbose else notices.fileno()):
        try:
            import tensorflow  # noqa: F401, ICN001 - imported for its messages
        except ModuleNotFoundError as error:
            if error.name != "tensorflow":
                raise
            raise MissingExtraError("this command", "tensorflow", "tf") from None


@contextlib.contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, including the output of other languages and child processes on file descriptor 1."""
    sys.stdout.flush()
    with _redirected(1, 2), contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _redirected(descriptor: int, to: int) -> Iterator[None]:
    saved = os.dup(descriptor)
    os.dup2(to, descriptor)
    try:
        yield
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)
