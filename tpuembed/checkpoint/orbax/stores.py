"""Locates the arrays of an item for TensorStore, and turns its errors into CheckpointErrors."""

import os
from pathlib import Path
from typing import Any, Final, NoReturn

from tpuembed.checkpoint.orbax.metadata import Leaf
from tpuembed.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError
from tpuembed.files import FilePath

__all__ = ["ERRORS", "OPEN_SECONDS", "READ_SECONDS", "RETRIES", "array_spec", "fail", "wait"]

OPEN_SECONDS: Final = 120
"""How long to wait for a few kilobytes from a store."""
READ_SECONDS: Final = 900
"""How long to wait for a chunk, or for a few small ones."""
RETRIES: Final = {
    name: {"max_retries": 6, "initial_delay": "500ms", "max_delay": "16s"}
    for name in ("gcs_request_retries", "s3_request_retries")
}
"""Retries of a request that a store refuses: for about half a minute. TensorStore's default of 32 takes a quarter of an
hour.
"""
ERRORS: Final = (ValueError, OSError, NotImplementedError)
"""The exceptions that TensorStore raises; TimeoutError is an OSError."""
_STORES: Final = {"s3": "s3", "gs": "gcs"}
"""Schemes of URLs -> TensorStore's drivers."""
_TRUE: Final = frozenset({"1", "on", "true", "y", "yes"})
_SYSTEM: Final = (
    "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED",
    "UNAVAILABLE", "UNKNOWN"
)  # fmt: skip
"""TensorStore's status codes for errors of the system. Other codes mean that the files are damaged."""


def array_spec(leaf: Leaf) -> dict[str, Any]:
    """Return TensorStore's spec of the array of `leaf`."""
    item, path = leaf.item, f"{leaf.key}/"
    # The files of one array are in a folder, or they are keys with a common prefix in the item's database.
    database = {"driver": "ocdbt", "base": _folder(item.folder), "path": path, "cache_pool": "cache_pool#nodes"}
    return {
        "driver": "zarr3" if item.zarr3 else "zarr",
        "kvstore": database if item.ocdbt else _folder(item.folder, path),
        "recheck_cached_data": "open",
    }


def _folder(folder: FilePath, key: str = "") -> dict[str, Any]:
    """Return the place of a folder, on a disk or in a store, for TensorStore."""
    if isinstance(folder, Path):
        return {"driver": "file", "path": f"{folder.absolute()}/{key}"}
    if folder.scheme not in _STORES:
        raise CheckpointFormatError(
            f"checkpoint {folder}: Orbax checkpoints can be read only from disks, s3:// and gs://."
        )
    if folder.scheme == "gs" and os.environ.get("GOOGLE_BASE_URL") and not os.environ.get("TENSORSTORE_GCS_HTTP_URL"):
        raise CheckpointError(
            f"checkpoint {folder}: GOOGLE_BASE_URL names a server, but TensorStore, which reads the arrays, uses "
            "Google's. Set TENSORSTORE_GCS_HTTP_URL to a server with the JSON API, or unset GOOGLE_BASE_URL."
        )
    options = _s3_options() if folder.scheme == "s3" else {}
    return {"driver": _STORES[folder.scheme], "bucket": folder.bucket, "path": f"{folder.key}/{key}", **options}


def _s3_options() -> dict[str, Any]:
    """Return the server and the source of credentials. Otherwise TensorStore logs a complaint for every credentials
    file it lacks.
    """
    endpoint = (
        os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
    )
    options: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in _TRUE:
        options["aws_credentials"] = {"type": "anonymous"}
    elif os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"):
        options["aws_credentials"] = {"type": "environment"}
    return options


def wait(leaf: Leaf, future: Any, seconds: int) -> Any:
    """Return the result of `future`. For a store, wait at most `seconds`."""
    return future.result() if isinstance(leaf.item.folder, Path) else future.result(timeout=seconds)


def fail(leaf: Leaf, error: Exception) -> NoReturn:
    """Raise TensorStore's error as one line: its code and its message."""
    where = f"checkpoint {leaf.item.folder}: array {leaf.shown}"
    if isinstance(error, TimeoutError):
        raise CheckpointError(
            f"{where}: the store did not answer in time. It must be reachable from here, with credentials that "
            "TensorStore finds."
        ) from None
    text = " ".join(str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0].split())
    message = f"{where}: {text[:500]}"
    if text.startswith(_SYSTEM):
        raise CheckpointError(message) from None
    raise CheckpointCorruptError.of(f"{message}") from None
