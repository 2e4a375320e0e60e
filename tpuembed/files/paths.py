"""What a user's text names: a path on a disk, or a URL in an object store with the methods of a path."""

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
"""Of URLs that are read; memory:// is this process's own, for tests."""


@dataclasses.dataclass(frozen=True, order=True)
class UrlPath:
    """`scheme://bucket/key`, with those methods of `pathlib.Path` that readers need; a key is taken letter by letter.

    Attributes:
        scheme: one of s3, gs, memory.
        bucket: what holds the object.
        key: of the object, or of what would be its folder: no slash at either end, "" for the bucket itself.
    """

    scheme: str
    bucket: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")

    def __fspath__(self) -> str:
        """So that commands and processes can be given it; the system's own calls do not read it."""
        return str(self)

    def __truediv__(self, name: "str | Path") -> "UrlPath":
        """Below this one; "..", as in a path, is the folder above, and never above the bucket."""
        joined = posixpath.normpath(posixpath.join("/", self.key, str(name).lstrip("/")))
        return dataclasses.replace(self, key=joined.strip("/"))

    @property
    def name(self) -> str:
        """The last part of the key."""
        return posixpath.basename(self.key)

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        return posixpath.splitext(self.key)[1]

    @property
    def parent(self) -> "UrlPath":
        """The folder it lies in."""
        return dataclasses.replace(self, key=posixpath.dirname(self.key))

    def version(self) -> FileVersion:
        """Size and ETag of the object. FileNotFoundError where there is none."""
        return remote.head(self)

    def is_file(self) -> bool:
        """Whether there is such an object."""
        try:
            return bool(self.key) and self.version().size >= 0
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Whether there are objects below it."""
        return next(self.iterdir(), None) is not None

    def exists(self) -> bool:
        """Whether it is one or the other."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator["UrlPath"]:
        """The objects and folders right below it."""
        return (dataclasses.replace(self, key=key) for key in remote.children(self))

    def read_bytes(self) -> bytes:
        """All of the object."""
        file = remote.RemoteFile(self)
        out = bytearray(file.version.size)
        file.read_into(0, memoryview(out))
        return bytes(out)

    def read_text(self, encoding: str = "utf-8") -> str:
        """All of the object, decoded."""
        return self.read_bytes().decode(encoding)


FilePath = Path | UrlPath


def as_path(text: str | FilePath) -> FilePath:
    """The path or URL that `text` is; `file://` is a path.

    Raises:
        ConfigError: a URL of a scheme that is not read, or without a bucket; or nothing at all.
    """
    if not isinstance(text, str):
        return text
    if not text:
        raise ConfigError("the path is empty; the current directory is .")
    scheme, separator, rest = text.partition("://")
    if not separator:
        return Path(text)
    if scheme == "file":
        return Path(urllib.parse.unquote(rest.removeprefix("localhost")))
    bucket, _, key = rest.partition("/")
    if scheme not in SCHEMES or not bucket:
        raise ConfigError(
            f"{text}: only local paths and s3://BUCKET/KEY, gs://BUCKET/KEY and file:///PATH are read; copy it to a disk"
        )
    return UrlPath(scheme, bucket) / key
