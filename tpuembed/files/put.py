"""Uploads an open file to a URL by PUT, with retries. This is the only access to a store that workers need.

The standard library does it, in two megabytes of memory. Amazon's client would take more than a worker has.
"""

import errno
import functools
import http.client
import os
import random
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, Final

from tpuembed.files.store_errors import refusal, store_error

__all__ = ["put_file"]

_PAUSES_SECONDS: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses between tries."""
_TIMEOUT_SECONDS: Final = 60.0
_BLOCK_BYTES: Final = 256 << 10
_MAY_PASS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_EXPIRED: Final = (b"ExpiredToken", b"Request has expired", b"TokenRefreshRequired", b"RequestTimeTooSkewed")
_MAX_BODY_BYTES: Final = 2000


def put_file(
    url: str, file: BinaryIO, size: int, headers: Mapping[str, str], on_block: Callable[[], None] = lambda: None
) -> str:
    """PUT the first `size` bytes of `file` and return the ETag of the answer. `on_block` is called after every block.

    Raises:
        TimeoutError: it failed too often with errors that may be temporary, or the URL has expired.
        PermissionError: the store refuses it.
        FileNotFoundError: the target of the URL is gone.
        OSError: any other failure.
    """
    for pause in (*_PAUSES_SECONDS, None):
        failure = ""
        try:
            return _put(url, file, size, headers, on_block)
        except urllib.error.HTTPError as error:
            with error:
                body = error.read(_MAX_BODY_BYTES)
            failure = refusal(error.code, body.decode(errors="replace"))
            if error.code not in _MAY_PASS and b"RequestTimeout" not in body and b"BadDigest" not in body:
                if any(code in body for code in _EXPIRED):
                    raise TimeoutError(errno.ETIMEDOUT, failure) from None  # a newly signed URL may work
                raise store_error(error.code, failure) from None
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(reason, ssl.SSLCertVerificationError):
                remedy = "Set AWS_CA_BUNDLE to a file with the store's CA certificate"
                raise PermissionError(errno.EACCES, f"{reason.verify_message}. {remedy}") from None
            failure = f"{type(reason).__name__}: {reason}"
        if pause is not None:
            time.sleep(pause * random.uniform(0.5, 1.5))
    raise TimeoutError(errno.ETIMEDOUT, f"{failure} ({len(_PAUSES_SECONDS) + 1} times in a row)")


def _put(url: str, file: BinaryIO, size: int, headers: Mapping[str, str], on_block: Callable[[], None]) -> str:
    # Some servers parse the body of a request without a type as form data.
    fields = {"Content-Type": "application/octet-stream", **headers, "Content-Length": str(size)}
    request = urllib.request.Request(url, data=_blocks(file, size, on_block), headers=fields, method="PUT")
    with _opener().open(request, timeout=_TIMEOUT_SECONDS) as answer:
        answer.read(_MAX_BODY_BYTES)
        return str(answer.headers["ETag"] or "")


def _blocks(file: BinaryIO, size: int, on_block: Callable[[], None]) -> Iterator[Any]:
    file.seek(0)
    buffer, left = memoryview(bytearray(_BLOCK_BYTES)), size
    while left:
        count = file.readinto(buffer[:left])  # type: ignore[attr-defined]
        if not count:
            raise OSError(errno.EIO, f"a temporary file ends {left} bytes early")
        left -= count
        yield buffer[:count]
        on_block()


@functools.cache
def _opener() -> Any:
    """Return an opener for http and https that uses the proxies of the environment."""
    context = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or None)
    return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
