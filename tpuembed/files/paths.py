"""The paths that users give: a path on a disk, or a URL in an object store with the methods of a path."""

import dataclasses
import posixpath
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tpuembed.errors import ConfigError
from tpuembed.files import remote
from tpuembed.files.types import FileVersion

__all__ = ["FilePath", "UrlPath", "as_path"]

SCHEMES: Final = ("s3", "gs", "memory")
"""Schemes of URLs that can be read; memory:// is this process's own store, for tests."""


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
        return remote.head(self)

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
        """Return the objects and folders directly below it."""
        return (dataclasses.replace(self, key=key) for key in remote.children(self))

    def read_bytes(self) -> bytes:
        """Return all bytes of the object."""
        file = remote.RemoteFile(self)
        out = bytearray(file.version.size)
        file.read_into(0, memoryview(out))
        return bytes(out)

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the text of the object."""
        return self.read_bytes().decode(encoding)


FilePath = Path | UrlPath


def as_path(text: str | FilePath) -> FilePath:
    """Return the path or URL for `text`. `file://` gives a path.

    Raises:
        ConfigError: the text is empty, or a URL of another scheme, or without a bucket.
    """
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
