"""Where the arrays of an item lie, as TensorStore names it, and what TensorStore says when they cannot be read."""

import os
from pathlib import Path
from typing import Any, Final, NoReturn

from tpuembed.checkpoint.orbax.metadata import Item, Leaf
from tpuembed.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError
from tpuembed.files import FilePath

__all__ = ["ERRORS", "OPEN_SECONDS", "READ_SECONDS", "RETRIES", "array_spec", "fail", "wait"]

OPEN_SECONDS: Final = 120
"""To wait for a few kilobytes of a store's."""
READ_SECONDS: Final = 900
"""To wait for a chunk, or for a few small ones."""
RETRIES: Final = {
    name: {"max_retries": 6, "initial_delay": "500ms", "max_delay": "16s"}
    for name in ("gcs_request_retries", "s3_request_retries")
}
"""Of a request that a store refuses: for half a minute or so. TensorStore's own are 32, a quarter of an hour."""
ERRORS: Final = (ValueError, OSError, NotImplementedError)
"""What TensorStore raises; TimeoutError is an OSError."""
_STORES: Final = {"s3": "s3", "gs": "gcs"}
"""Schemes of URLs -> TensorStore's drivers."""
_TRUE: Final = frozenset({"1", "on", "true", "y", "yes"})
_SYSTEM: Final = (
    "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED",
    "UNAVAILABLE", "UNKNOWN"
)  # fmt: skip
"""TensorStore's status codes for what is not in the files; others say that these are not as they should be."""


def array_spec(leaf: Leaf) -> dict[str, Any]:
    """How TensorStore opens the array of `leaf`."""
    return {
        "driver": "zarr3" if leaf.item.zarr3 else "zarr",
        "kvstore": _kvstore(leaf.item, leaf.key),
        "recheck_cached_data": "open",
    }


def _kvstore(item: Item, key: str) -> dict[str, Any]:
    """Where the files of one array are: a folder, or keys with one beginning in the item's database."""
    if not item.ocdbt:
        return _folder(item.folder, f"{key}/")
    return {"driver": "ocdbt", "base": _folder(item.folder), "path": f"{key}/", "cache_pool": "cache_pool#nodes"}


def _folder(folder: FilePath, key: str = "") -> dict[str, Any]:
    """On a disk or in a store, which TensorStore reads by itself."""
    if isinstance(folder, Path):
        return {"driver": "file", "path": f"{folder.absolute()}/{key}"}
    if folder.scheme not in _STORES:
        raise CheckpointFormatError(f"checkpoint {folder}: Orbax checkpoints are read from disks, s3:// and gs:// only")
    if folder.scheme == "gs" and os.environ.get("GOOGLE_BASE_URL") and not os.environ.get("TENSORSTORE_GCS_HTTP_URL"):
        raise CheckpointError(
            f"checkpoint {folder}: GOOGLE_BASE_URL names a server, and TensorStore, which reads the arrays, asks Google's; set "
            "TENSORSTORE_GCS_HTTP_URL to one that speaks the JSON API, or unset GOOGLE_BASE_URL"
        )
    options = _s3_options() if folder.scheme == "s3" else {}
    return {"driver": _STORES[folder.scheme], "bucket": folder.bucket, "path": f"{folder.key}/{key}", **options}


def _s3_options() -> dict[str, Any]:
    """The server, and where the credentials are: TensorStore, left to look for them, complains of every file that is not there."""
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
    """What `future` brings; a store that never answers is waited for no longer than `seconds`."""
    return future.result() if isinstance(leaf.item.folder, Path) else future.result(timeout=seconds)


def fail(leaf: Leaf, error: Exception) -> NoReturn:
    """The one line of what TensorStore says: its code, and what it found."""
    where = f"checkpoint {leaf.item.folder}: array {leaf.shown}"
    if isinstance(error, TimeoutError):
        raise CheckpointError(
            f"{where}: the store gave no answer in time; it must be reachable from here, with credentials that TensorStore finds"
        ) from None
    text = " ".join(str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0].split())
    message = f"{where}: {text[:500]}"
    if text.startswith(_SYSTEM):
        raise CheckpointError(message) from None
    raise CheckpointCorruptError(f"{message}; restore it from another copy") from None
