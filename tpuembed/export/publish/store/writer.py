"""Writes versions into an object store.

The version is locked first. TensorFlow's files are small and go to a temporary folder of this machine. Table data
goes directly to uploads, which no listing shows. The commit completes the uploads and writes the other files. It writes
`saved_model.pb` last, and only if that object does not exist yet. During the commit, servers see a folder without it, which
they cannot load.

Nothing is resumed. A killed export leaves its lock, its uploads, and if it was committing, some objects without `saved_model.pb`.
"""

import functools
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tpuembed.errors import ConfigError, ExportError, warn
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan.plan import ExportPlan, ShardTask
from tpuembed.export.publish.layouts import Layout, choose_layout, data_file_names
from tpuembed.export.publish.store.parts import check_sizes, parts_of
from tpuembed.export.publish.version_writer import (
    MAX_VERSION,
    PREFIX,
    VersionWriter,
    check_version,
    naming_model_dir,
    versions_among,
)
from tpuembed.export.stream.shard import Batch, ShardResult, Source, Target
from tpuembed.files import UrlPath, in_parallel
from tpuembed.files.bucket import Bucket, md5
from tpuembed.formats.saved_model import GRAPH_FILE

__all__ = ["StoreWriter"]

_LOCK: Final = re.compile(re.escape(PREFIX) + r"(\d{1,19})", re.ASCII)
_PROBE: Final = f"{PREFIX}probe"


class StoreWriter(VersionWriter):
    """Writes a version into a bucket. Data files are uploads, started before the first part is made.

    The lock of a version is the object `MODEL_DIR/.staging-<version>`. It is created only if it does not exist, so one export
    writes a version. An export that is killed leaves its lock, and the next one takes the next number.
    """

    model_dir: UrlPath

    def __init__(self, model_dir: UrlPath, plan: ExportPlan, options: ExportOptions, source: Source) -> None:
        super().__init__(model_dir, plan, options, source)
        self._parts: Mapping[str, list[Batch]] = {}  # of a data file, in order
        self._numbers: Mapping[int, int] = {}  # the index of a part -> its number, from 1 on in each data file
        self._uploads: dict[str, str] = {}  # the key of a data file -> the id of its upload
        self._tags: dict[int, str] = {}  # the index of a shard -> the ETag of its part
        self._lock = ""
        self._is_committing = self._is_visible = False

    @functools.cached_property
    def _bucket(self) -> Bucket:
        with naming_model_dir(self.model_dir):
            return Bucket(self.model_dir.bucket)

    def check(self) -> None:
        """See VersionWriter.check. A store has no limit on space."""
        check_sizes(self.plan)
        if self.options.layout == "mmap" and self.options.serving_root is None:
            raise ConfigError(
                f"MODEL_DIR {self.model_dir}: a server cannot map files of a store. Name the folder that versions "
                "will be copied to, or mounted at, with serving_root, or choose layout "
                "'variables'."
            )
        with naming_model_dir(self.model_dir):
            self._choose(self.options.version)

    @property
    def layout(self) -> Layout:
        """See VersionWriter.layout."""
        return choose_layout(self.options.layout, None, self.options.serving_root)

    def reserve(self) -> None:
        """Lock the version."""
        with naming_model_dir(self.model_dir):
            self._check_conditions()
            self._version, self._lock = self._lock_version(self.options.version)
        self._folder = Path(tempfile.mkdtemp(prefix="tpuembed-export-"))
        self.path, self.tables = self._folder / "version", self._folder / "tables"
        for folder in (self.path, self.tables):
            folder.mkdir()

    def open(self) -> Sequence[ShardTask]:
        """Start the uploads. Return all shards."""
        self._names = data_file_names(self.path, self.plan.stacks)
        self._parts = parts_of(self.plan)
        self._numbers = {part.index: number for parts in self._parts.values() for number, part in enumerate(parts, 1)}
        with naming_model_dir(self.model_dir):
            for stack in self.plan.stacks:
                with open(self.tables / stack.file, "wb") as file:  # sparse: it stands for the object in `assemble`
                    file.truncate(stack.size)
                key = self._key(self._names[stack.file])
                self._uploads[key] = self._bucket.begin_upload(key)
        return self.plan.shards

    def batches(self, tasks: Sequence[ShardTask]) -> list[Batch]:
        """See VersionWriter.batches. A batch is a part."""
        asked = {task.index for task in tasks}
        return [part for parts in self._parts.values() for part in parts if part.index in asked]

    def target(self, batch: Batch) -> Target:
        """See VersionWriter.target."""
        file = batch.shards[0].file
        key, number = self._key(self._names[file]), self._numbers[batch.index]
        with naming_model_dir(self.model_dir):
            url = self._bucket.sign_part(key, self._uploads[key], number)
        return Target(kind="part", place=url, shown=f"s3://{self._bucket.name}/{key}, part {number}")

    def results(self, streamed: Sequence[ShardResult]) -> Sequence[ShardResult]:
        """See VersionWriter.results."""
        self._tags = {result.index: result.tag for result in streamed}
        return streamed

    def publish(self, settle: Callable[[str], None] = lambda _: None) -> UrlPath:
        """Write the version, `saved_model.pb` last, and return its URL.

        Args:
            settle: called with the version's name before anything of it is written.

        Raises:
            ExportError: a file cannot be written, or another export has the version.
        """
        version, graph = self._version, GRAPH_FILE.as_posix()
        settle(str(version))
        files = {path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file()}
        others = sorted(files - {*self._names.values(), graph})
        with naming_model_dir(self.model_dir):
            if self._bucket.keys(self._key("")):
                raise self._exists()
            self._is_committing = True
            try:
                self._complete()
                in_parallel(lambda name: self._bucket.put(self._key(name), self.path / name), others)
            except FileExistsError:
                self._is_committing = False  # the version is another program's
                raise self._exists() from None
            if not self._has_lock():
                raise ExportError(
                    f"MODEL_DIR {self.model_dir}: version {version}: its lock {PREFIX}{version} was removed or replaced while this "
                    "export was writing it. Export again."
                )
            try:
                self._bucket.create(self._key(graph), (self.path / GRAPH_FILE).read_bytes())
            except FileExistsError:
                self._is_committing = False  # the version is another program's
                raise self._exists() from None
            self._is_visible = True
        return self.model_dir / str(version)

    def _exists(self) -> ExportError:
        return ExportError(
            f"MODEL_DIR {self.model_dir}: version {self._version} exists: another program wrote it meanwhile. Export again."
        )

    def _complete(self) -> None:
        """Complete every upload. Raises ExportError if the resulting object has the wrong size."""
        for stack in self.plan.stacks:
            key, size = self._key(self._names[stack.file]), stack.size
            tags = [self._tags[part.index] for part in self._parts[stack.file]]
            try:
                self._bucket.complete_upload(key, self._uploads[key], tags)
            except OSError as error:
                # Perhaps the upload was completed before, and then the answer was lost.
                is_lost = isinstance(error, FileNotFoundError | FileExistsError)
                if not is_lost or not _is_object(self._bucket, key, tags, size):
                    raise
            found = self._bucket.head(key)
            if found is None or found.size != size:
                raise ExportError(
                    f"data file s3://{self._bucket.name}/{key}: it has {found.size if found else 0} bytes, "
                    f"but its parts have {size}. Export again."
                )

    def abandon(self, *, keep: bool) -> None:  # noqa: ARG002 - nothing is kept
        """See VersionWriter.abandon. A failure to remove something is a warning."""
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            if not self._is_visible:
                for key, upload in self._uploads.items():
                    self._bucket.abort_upload(key, upload)
            if self._has_lock():  # else everything here is another export's
                if self._is_committing and not self._is_visible:
                    self._bucket.delete(self._bucket.keys(self._key("")))
                self._bucket.delete([self._lock_key(self._version)])
        except OSError as failure:
            warn(
                f"MODEL_DIR {self.model_dir}: the rest of version {self._version} cannot be removed: "
                f"{failure.strerror or failure}. Delete {PREFIX}{self._version}, and what is below {self._version}/.",
            )

    def _choose(self, version: int | None) -> int:
        """Return `version`, or the next free one for None. Locked versions are not free.

        Raises:
            ConfigError: it is not a positive integer that a server can read.
            ExportError: it exists or is locked, or there is no higher number.
        """
        check_version(version)
        names = self._bucket.children(f"{self.model_dir.key}/" if self.model_dir.key else "")
        locked = {int(match[1]) for match in map(_LOCK.fullmatch, names) if match}
        versions = versions_among(names) | locked
        free = max(versions, default=0) + 1
        if version in locked:
            raise ExportError(
                f"MODEL_DIR {self.model_dir}: version {version}: an export is writing it, or was killed while it did. If none "
                f"runs, delete {PREFIX}{version} and what is below {version}/, or choose another version, such as {free}."
            )
        if version in versions:
            raise ExportError(
                f"MODEL_DIR {self.model_dir}: version {version} exists. Choose another one, such as {free}."
            )
        if version is None and free > MAX_VERSION:
            raise ExportError(
                f"MODEL_DIR {self.model_dir}: it has version {MAX_VERSION}, the highest possible one. Export to another "
                "MODEL_DIR."
            )
        return version or free

    def _check_conditions(self) -> None:
        """Raise ExportError if the store ignores the condition not to replace an object. Then a lock would lock nothing."""
        key = (self.model_dir / f"{_PROBE}-{secrets.token_hex(8)}").key
        try:
            for _ in range(2):
                self._bucket.create(key, _token())
        except FileExistsError:
            return
        finally:
            self._bucket.delete([key])
        raise ExportError(
            f"MODEL_DIR {self.model_dir}: the store ignores If-None-Match, so two exports could write the same version. "
            "Export to a disk and copy the version, saved_model.pb last."
        )

    def _lock_version(self, version: int | None) -> tuple[int, str]:
        """Lock `version`, or the next free one for None, and return it with the lock's ETag. Raises as `_choose`."""
        while True:
            number = self._choose(version)
            try:
                tag = self._bucket.create(self._lock_key(number), _token())
            except FileExistsError:  # another export was faster; if it wrote this version, `_choose` says so
                continue
            if not self._bucket.keys((self.model_dir / str(number)).key + "/"):
                return number, tag
            self._bucket.delete([self._lock_key(number)])  # it was complete before the lock was there

    def _has_lock(self) -> bool:
        """Returns True if this export still has the lock."""
        lock = self._bucket.head(self._lock_key(self._version))
        return lock is not None and lock.tag == self._lock

    def _lock_key(self, version: int) -> str:
        return (self.model_dir / f"{PREFIX}{version}").key

    def _key(self, name: str) -> str:
        """Return the key of a file of the version; of all files the prefix for ""."""
        return (self.model_dir / str(self._version)).key + f"/{name}"


def _is_object(bucket: Bucket, key: str, tags: Sequence[str], size: int) -> bool:
    """Returns True if the object's ETag is that of an upload of parts with these ETags: the MD5 of their MD5s, and
    their number.

    ETags of another form, such as those of encrypted parts, prove nothing and give False.
    """
    found = bucket.head(key)
    if found is None or found.size != size or not all(tags):
        return False
    try:
        digests = b"".join(bytes.fromhex(tag.strip('"')) for tag in tags)
    except ValueError:
        return False
    return found.tag.strip('"') == f"{md5(digests).hexdigest()}-{len(tags)}"


def _token() -> bytes:
    """Return bytes that no other export writes, so that each lock has an ETag of its own."""
    return secrets.token_hex(16).encode()
