"""One version in an object store: its objects, and the proof that it is complete."""

import dataclasses
import errno
import hashlib
import io
from collections.abc import Mapping
from typing import Final

from tpuembed.errors import ConfigError, TpuEmbedError, first_few, printable, reason
from tpuembed.files import FileVersion, UrlPath, listing
from tpuembed.manifest import MANIFEST_PATH, Manifest
from tpuembed.protobuf import MalformedError, Message, UnsupportedError
from tpuembed.sstable import read_table
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.models.versions import GRAPH_FILE, INDEX_FILE

__all__ = ["SUCCESS_FILE", "IncompleteError", "StoredVersion", "fault_of", "find_objects"]

SUCCESS_FILE: Final = "_SUCCESS"
"""An object that the writer of a version creates last. It says that the version is complete."""
_MAX_NAME_BYTES: Final = 255
_MAX_PATH_BYTES: Final = 2048
_MAX_INDEX_BYTES: Final = 1 << 30
_SHARDS, _SHARD_ID, _OFFSET, _SIZE = 1, 3, 4, 5
"""Fields of BundleHeaderProto and BundleEntryProto of TensorFlow's tensor_bundle.proto."""


class IncompleteError(StatusError):
    """A version is not complete in its store, or cannot be proven to be. It may be being written."""

    def __init__(self, number: int, why: str, *, settles: bool = False) -> None:
        """`settles` is whether only time is missing."""
        super().__init__(Code.NOT_FOUND, f"version {number}: is not complete in its store: {why}")
        self.settles = settles


@dataclasses.dataclass(frozen=True)
class StoredVersion:
    """The objects of a version, as one listing has them.

    Attributes:
        number: of the version.
        url: its folder.
        objects: size and ETag, by the path inside the version. Each is a path that a file can have.
    """

    number: int
    url: UrlPath
    objects: Mapping[str, FileVersion]

    @property
    def digest(self) -> str:
        """Return a name for this content: it differs if a name, a size or an ETag does."""
        text = "\n".join(f"{name}\0{one.size}\0{one.tag}" for name, one in sorted(self.objects.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def manifest(self, *, unchanged_polls: int) -> Manifest | None:
        """Return the manifest of a complete version, or None if it is complete without one.

        A version with a manifest is complete if every file that it names is there at its size; the checksums are compared
        after the download. A version without one needs the graph, the index of the variables, and the data files that the
        index names, at the sizes that it implies at least; and the listing must have been the same at two more polls,
        or there is an object _SUCCESS.

        Args:
            unchanged_polls: how many polls before this one found the same objects.

        Raises:
            IncompleteError: it is not.
            StatusError: DATA_LOSS, its manifest or its index is none.
            OSError: the store fails.
        """
        if str(GRAPH_FILE) not in self.objects:
            raise IncompleteError(self.number, f"{GRAPH_FILE} is missing")
        if str(MANIFEST_PATH) in self.objects:
            try:
                manifest = Manifest.read(self.url)
            except ConfigError as error:
                raise StatusError(Code.DATA_LOSS, f"version {self.number}: {error}") from None
            if manifest is not None:
                sizes = {file: entry.size for file, entry in manifest.files.items() if file != str(GRAPH_FILE)}
                self._check_sizes(sizes | manifest.table_files(), exact=True)
                return manifest
        if SUCCESS_FILE in self.objects:
            return None
        if str(INDEX_FILE) not in self.objects:
            why = f"{INDEX_FILE} is missing. If the model has no variables, create an object {SUCCESS_FILE} beside {GRAPH_FILE}"
            raise IncompleteError(self.number, why)
        self._check_sizes(self._least_sizes(), exact=False)
        if unchanged_polls < 2:
            raise IncompleteError(self.number, "its objects have to stay the same for two polls", settles=True)
        return None

    def _check_sizes(self, sizes: Mapping[str, int], *, exact: bool) -> None:
        missing = sorted(sizes.keys() - self.objects.keys())
        if missing:
            raise IncompleteError(self.number, f"{first_few(missing)} {'is' if len(missing) == 1 else 'are'} missing")
        for file, size in sorted(sizes.items()):
            found = self.objects[file].size
            if found < size or (exact and found != size):
                source = f"the manifest has {size}" if exact else f"{INDEX_FILE} needs {size}"
                raise IncompleteError(self.number, f"{file} has {found} bytes, but {source}")

    def _least_sizes(self) -> dict[str, int]:
        """Return the least size of each data file, by the index of the variables.

        Source: tensorflow/core/protobuf/tensor_bundle.proto.
        """
        index = self.objects[str(INDEX_FILE)]
        if index.size > _MAX_INDEX_BYTES:
            raise StatusError(
                Code.DATA_LOSS,
                f"version {self.number}: {INDEX_FILE} has {index.size} bytes, and at most {_MAX_INDEX_BYTES} are read",
            )
        data = (self.url / INDEX_FILE).read_bytes()
        shards, ends = 0, dict[int, int]()
        try:
            for key, value in read_table(io.BytesIO(data)):
                entry = Message(value)
                if not key:
                    shards = entry.signed(_SHARDS)
                    continue
                shard, end = entry.signed(_SHARD_ID), entry.signed(_OFFSET) + entry.signed(_SIZE)
                ends[shard] = max(end, ends.get(shard, 0))
            if shards < 1 or max(ends, default=0) >= shards or min(ends, default=0) < 0 or shards > len(self.objects):
                raise MalformedError(f"it has {shards} data files, and there are {len(self.objects)} objects")
        except (MalformedError, UnsupportedError) as error:
            raise StatusError(Code.DATA_LOSS, f"version {self.number}: {INDEX_FILE}: {error}. Save it again") from None
        prefix = str(INDEX_FILE).removesuffix(".index")
        return {f"{prefix}.data-{shard:05d}-of-{shards:05d}": ends.get(shard, 0) for shard in range(shards)}


def find_objects(number: int, url: UrlPath) -> StoredVersion:
    """Return the objects of version `number` at `url`. Objects that stand for folders are left out.

    Raises:
        StatusError: INVALID_ARGUMENT, an object has a name that no file in the version's folder can have.
        OSError: the store fails.
    """
    inside = f"{url.key}/"
    found = {key.removeprefix(inside): one for key, one in listing(url).items() if key != url.key}
    for name in found:
        if fault := _fault(name):
            raise StatusError(Code.INVALID_ARGUMENT, f"version {number}: object {printable(name)[:200]!r} {fault}")
    folders = {name[:at] for name in found for at, char in enumerate(name) if char == "/"}
    for name in sorted(folders & found.keys()):
        if found[name].size:
            text = f"version {number}: object {printable(name)[:200]!r} is a file and a folder. Remove one of them"
            raise StatusError(Code.INVALID_ARGUMENT, text)
    return StoredVersion(number, url, {name: one for name, one in found.items() if name not in folders})


def _fault(name: str) -> str:
    """Return why `name` cannot be the path of a file inside a folder. Empty if it can."""
    parts = name.split("/")
    if {"", ".", ".."} & set(parts):
        return "would leave the version's folder. Rename it"
    if any(ord(char) < 32 or ord(char) == 127 for char in name):
        return "has control characters. Rename it"
    if len(name.encode()) > _MAX_PATH_BYTES or max(len(part.encode()) for part in parts) > _MAX_NAME_BYTES:
        return f"has a longer name than a file can have ({_MAX_NAME_BYTES} bytes a part, {_MAX_PATH_BYTES} in all)"
    return ""


def fault_of(number: int, error: Exception) -> StatusError:
    """Return why a version cannot be pulled, with the code for clients."""
    if isinstance(error, StatusError):
        return error
    code = Code.RESOURCE_EXHAUSTED if isinstance(error, OSError) and error.errno == errno.ENOSPC else Code.UNAVAILABLE
    what = (
        reason(error) if isinstance(error, OSError | TpuEmbedError | EOFError) else f"{type(error).__name__}: {error}"
    )
    where = f"{error.filename}: " if isinstance(error, OSError) and "://" in str(error.filename) else ""
    return StatusError(code, f"version {number}: cannot be pulled: {where}{what}")
