"""The paths that users give, on a disk or in S3 and Google Cloud Storage, whose objects are read through obstore.

The need for it beside boto3, which writes: checkpoints in gs://, which boto3 does not read. obstore finds credentials,
region and endpoint itself: AWS_* and GOOGLE_* variables, or the machine's identity.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime as dt
import errno
import functools
import posixpath
import re
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tpuembed.errors import ConfigError, MissingExtraError
from tpuembed.files.local import FileVersion, Pending, finish
from tpuembed.files.store_errors import NOT_ALLOWED, MissingBucketError, refusal, store_error

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["IN_FLIGHT_BYTES", "FilePath", "RemoteFile", "UrlPath", "as_path", "in_parallel", "listing", "subfolders"]

SCHEMES: Final = ("s3", "gs", "memory")
"""Schemes of URLs that can be read; memory:// is this process's own store, for tests."""

_REQUEST_BYTES: Final = 4 << 20
"""A longer range is split: several connections are faster than one."""
_REQUESTS: Final = 16
"""Parallel requests of this process; together they request 64 MiB at most."""
_CHUNK_BYTES: Final = 1 << 18
"""The chunk size of a response."""
IN_FLIGHT_BYTES: Final = _REQUESTS * 4 * _CHUNK_BYTES
"""Most bytes of responses that are not in their buffers yet: some chunks per request, in Python and the client."""
_MAX_MESSAGE: Final = 300

_NO_BUCKET: Final = "status code: 404 Not Found"
"""A part of the client's message, which has no class for this error. A listing fails so only if the bucket is missing."""

_ANSWER: Final = re.compile(r"non-2xx status code: (\d{3})\b")

_CREDENTIALS: Final = {
    "/latest/api/token": "no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true. Profiles in "
    '~/.aws are not read. Run: eval "$(aws configure export-credentials --format env)"',
    "/computeMetadata/": "no credentials. Set GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true",
}
"""Paths of the service that gives a cloud's machine its identity, which is tried last -> the remedy if there is none."""

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclasses.dataclass(frozen=True, order=True)
class UrlPath:
    """A URL `scheme://bucket/key` with those methods of `pathlib.Path` that readers need. A key is used literally.

    Attributes:
        scheme: one of s3, gs, memory.
        bucket: the bucket of the object.
        key: of the object or folder: no slash at either end, "" for the bucket itself.
    """

    scheme: str
    bucket: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")

    def __fspath__(self) -> str:
        """Return the URL, so that commands and processes can be given it. The system's own calls do not read it."""
        return str(self)

    def __truediv__(self, name: "str | Path") -> "UrlPath":
        """Return the path `name` below this one. ".." is the folder above, as in a path, but never above the bucket."""
        joined = posixpath.normpath(posixpath.join("/", self.key, str(name).lstrip("/")))
        return dataclasses.replace(self, key=joined.strip("/"))

    @property
    def name(self) -> str:
        """Return the last part of the key."""
        return posixpath.basename(self.key)

    @property
    def suffix(self) -> str:
        """Return the extension of the name, with its dot."""
        return posixpath.splitext(self.key)[1]

    @property
    def parent(self) -> "UrlPath":
        """Return the folder that contains it."""
        return dataclasses.replace(self, key=posixpath.dirname(self.key))

    def version(self) -> FileVersion:
        """Return size and ETag of the object. Raises FileNotFoundError if there is none."""
        store = _store(self.scheme, self.bucket)
        import obstore

        with _failing(self):
            return _version_of(obstore.head(store, self.key))

    def is_file(self) -> bool:
        """Returns True if the object exists."""
        try:
            return bool(self.key) and self.version().size >= 0
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Returns True if there are objects below it."""
        return next(self.iterdir(), None) is not None

    def exists(self) -> bool:
        """Returns True if it is an object or a folder."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator["UrlPath"]:
        """Yield the objects and folders directly below it. Raises MissingBucketError if the bucket does not exist."""
        try:
            found = _directly_below(self)
        except MissingBucketError:
            raise
        except FileNotFoundError:  # the key is not a possible one
            return
        for key in (*found["common_prefixes"], *(entry["path"] for entry in found["objects"])):
            yield dataclasses.replace(self, key=key)

    def read_bytes(self) -> bytes:
        """Return all bytes of the object."""
        file = RemoteFile(self)
        out = bytearray(file.version.size)
        file.read_into(0, memoryview(out))
        return bytes(out)

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the text of the object."""
        return self.read_bytes().decode(encoding)


FilePath = Path | UrlPath


def as_path(text: str | FilePath) -> FilePath:
    """Return the path or URL for `text`. Raises ConfigError if it is empty, or a URL of another scheme or without a bucket."""
    if not isinstance(text, str):
        return text
    if not text:
        raise ConfigError("the path is empty. The current directory is '.'.")
    scheme, separator, rest = text.partition("://")
    if not separator:
        return Path(text)
    if scheme == "file":
        return Path(urllib.parse.unquote(rest.removeprefix("localhost")))
    bucket, _, key = rest.partition("/")
    if scheme not in SCHEMES:
        raise ConfigError(
            f"URL {text}: scheme {scheme!r} is not supported. Give a path, s3://BUCKET/KEY, gs://BUCKET/KEY or file:///PATH."
        )
    if not bucket:
        raise ConfigError(f"URL {text}: has no bucket. Write {scheme}://BUCKET/KEY.")
    return UrlPath(scheme, bucket) / key


class RemoteFile:
    """An object as it was when this was created. If it is replaced, reads raise an error.

    Attributes:
        version: its size and ETag.
    """

    def __init__(self, path: UrlPath) -> None:
        self.version = path.version()
        self._path = path

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out`, contiguous bytes, with the bytes at `offset`."""
        with finish() as pending:
            pending += self.begin([(offset, out)])

    def begin(self, ranges: Iterable[tuple[int, memoryview]]) -> Pending:
        """Request the bytes of every range. The buffers are full when all returned futures are done."""
        ranges = list(ranges)
        for offset, out in ranges:  # check all of them before the first request is sent
            if offset + len(out) > self.version.size:
                end = max(offset, self.version.size)
                raise EOFError(f"{self._path}: ends at byte {self.version.size}, {offset + len(out) - end} bytes early")
        pieces = ((offset, out, at) for offset, out in ranges for at in range(0, len(out), _REQUEST_BYTES))
        return [_pool().submit(self._read, offset + at, out[at : at + _REQUEST_BYTES]) for offset, out, at in pieces]

    def _read(self, offset: int, out: memoryview) -> None:
        """Read one range of the version that was opened."""
        import obstore

        options: Any = {"range": (offset, offset + len(out)), "if_match": self.version.tag or None}
        done = 0
        with _failing(self._path):
            response = obstore.get(_store(self._path.scheme, self._path.bucket), self._path.key, options=options)
            for chunk in response.stream(min_chunk_size=_CHUNK_BYTES):
                out[done : done + len(chunk)] = memoryview(chunk)
                done += len(chunk)
        if done != len(out):
            raise EOFError(f"{self._path}: ends at byte {offset + done}, {len(out) - done} bytes early")

    def close(self) -> None:
        """Do nothing: connections belong to the store and are shared."""


def subfolders(path: UrlPath) -> list[str]:
    """Return the names of the folders directly below `path`. Raises OSError, also for a key that is not a possible one."""
    return [key.rpartition("/")[2] for key in _directly_below(path)["common_prefixes"]]


def _directly_below(path: UrlPath) -> Any:
    store = _store(path.scheme, path.bucket)
    import obstore

    with _failing(path, lists=True):
        return obstore.list_with_delimiter(store, path.key or None)


def listing(path: UrlPath) -> dict[str, FileVersion]:
    """Return size and ETag of all objects below `path`, by key."""
    store = _store(path.scheme, path.bucket)
    import obstore

    with _failing(path):
        return {entry["path"]: _version_of(entry) for page in obstore.list(store, path.key or None) for entry in page}


def _version_of(entry: Any) -> FileVersion:
    return FileVersion(entry["size"], entry["e_tag"] or entry["last_modified"].isoformat())


def in_parallel(function: Callable[[_In], _Out], items: Iterable[_In]) -> list[_Out]:
    """Return `function` of every item, in order. As many run at once as there are parallel requests."""
    return list(_pool().map(function, items))


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_REQUESTS, "tpuembed-requests")


@functools.cache
def _store(scheme: str, bucket: str) -> "ObjectStore":
    """Return the store of a bucket, which holds its connections."""
    try:
        from obstore.store import MemoryStore, from_url
    except ModuleNotFoundError:
        raise MissingExtraError(f"{scheme}://", "obstore", "cloud") from None
    if scheme == "memory":
        return MemoryStore()
    # obstore's defaults retry for three minutes, which looks like a hang on a machine without credentials.
    retry: Any = {"max_retries": 5, "retry_timeout": dt.timedelta(seconds=60)}
    return from_url(f"{scheme}://{bucket}", retry_config=retry)


@contextlib.contextmanager
def _failing(path: UrlPath, *, lists: bool = False) -> Iterator[None]:
    """Turn the client's errors into OSErrors. `lists`: it asks for what is directly below `path`."""
    from obstore import exceptions

    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split("\n\n", maxsplit=1)[0].split())  # the first paragraph of the client's message
        answer = _ANSWER.search(str(error))
        status = int(answer[1]) if answer else 0
        if lists and _NO_BUCKET in text:
            raise MissingBucketError(errno.ENOENT, f"the bucket {path.bucket!r} does not exist", str(path)) from None
        if isinstance(error, FileNotFoundError):
            raise store_error(404, "the object does not exist", str(path)) from None
        hint = next((hint for service, hint in _CREDENTIALS.items() if service in text), "")
        short = text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."
        line = hint or (refusal(status, text) if status else short)
        if isinstance(error, ValueError):  # the client cannot encode the key, for example because of control characters
            raise store_error(404, line, str(path)) from None
        if isinstance(error, exceptions.PreconditionError):
            raise OSError(errno.ESTALE, "it has changed since it was opened. Open it again", str(path)) from None
        if (
            isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
            or status in NOT_ALLOWED
        ):
            remedy = "" if hint else ". The credentials are wrong, or may not read there"
            raise store_error(403, line + remedy, str(path)) from None
        raise store_error(0, line, str(path)) from None
