"""Errors of a store, as an export reports them."""

import contextlib
from collections.abc import Iterator

from tpuembed.errors import ExportError
from tpuembed.files import MissingBucketError, UrlPath

__all__ = ["failing"]


@contextlib.contextmanager
def failing(model_dir: UrlPath) -> Iterator[None]:
    """Turn an OSError into an ExportError that names MODEL_DIR."""
    try:
        yield
    except OSError as error:
        what = error.strerror or str(error)
        raise ExportError(f"MODEL_DIR {model_dir}: cannot be written: {what}.{_remedy(error)}") from None


def _remedy(error: OSError) -> str:
    if isinstance(error, PermissionError) and "no credentials" not in str(error):
        return " These credentials are wrong, or may not list, read, write and delete there."
    if isinstance(error, MissingBucketError):
        return " Create it, or name another bucket."
    return ""
