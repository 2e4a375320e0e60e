"""Turns a store's refusal into an OSError with one short line: status, code and message, and nothing else of the body."""

import errno
import http.client
import re
from typing import Final

__all__ = ["NOT_ALLOWED", "MissingBucketError", "refusal", "store_error"]

NOT_ALLOWED: Final = (401, 403)
"""Statuses for wrong credentials and for missing permissions: stores do not distinguish the two."""
_MAX_MESSAGE: Final = 200


class MissingBucketError(FileNotFoundError):
    """The bucket of a URL does not exist."""


def refusal(status: int, body: str = "", code: str = "", message: str = "") -> str:
    """Return the line for an answer of `status` with a `body` of S3's XML, a proxy's HTML, or anything; or with its parts."""
    code, message = code or _field("Code", body), message or _field("Message", body)
    if not code or code == str(status):
        return f"the store answers {status} {http.client.responses.get(status, '')}".rstrip()
    return f"the store answers {status} {code}: {message[:_MAX_MESSAGE]}".rstrip(":. ")


def _field(name: str, body: str) -> str:
    found = re.search(rf"<{name}>([^<]*)", body)
    return " ".join(found[1].split()) if found else ""


def store_error(status: int, line: str, url: str | None = None) -> OSError:
    """Return the error for an answer of `status`: PermissionError, FileNotFoundError, FileExistsError, or another OSError."""
    if status in NOT_ALLOWED:
        return PermissionError(errno.EACCES, line, url)
    if status == 404:
        return FileNotFoundError(errno.ENOENT, line, url)
    if status in (409, 412):
        return FileExistsError(errno.EEXIST, line, url)
    return OSError(errno.EIO, line, url)
