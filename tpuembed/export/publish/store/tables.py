"""Data files as uploads, started before the first part is made and completed after the whole version is verified."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tpuembed.errors import ExportError
from tpuembed.export.plan.plan import ExportPlan, ShardTask
from tpuembed.export.publish.store.failing import failing
from tpuembed.export.publish.store.heartbeat import LeaseRenewer
from tpuembed.export.publish.store.parts import StackPart, parts_of
from tpuembed.export.publish.store.record import Upload
from tpuembed.export.publish.store.version_lease import StoreModelDir
from tpuembed.export.stream.batch import Batch, Where
from tpuembed.export.stream.resume_log import Header
from tpuembed.export.stream.shard import ShardResult
from tpuembed.files.bucket import Bucket, Part, md5

__all__ = ["StoreTables"]


class StoreTables:
    """The data files of one version; a `Tables`, and the `Place` of its parts."""

    def __init__(self, root: StoreModelDir, lease: LeaseRenewer, folder: Path, names: Mapping[str, str]) -> None:
        """Create the tables of a version in MODEL_DIR `root`.

        Args:
            names: `StackPlan.file` -> the path of its data file inside the version.
            folder: for sparse files that stand for the objects.
        """
        self._root, self._lease, self._folder, self._names = root, lease, folder, names
        self._sizes: dict[str, int] = {}
        self._parts: dict[str, list[StackPart]] = {}
        self._by_index: dict[int, StackPart] = {}
        self._uploads: dict[str, Upload] = {}
        self._known: dict[int, ShardResult] = {}
        self._results: dict[int, ShardResult] = {}

    @property
    def folder(self) -> Path:
        """See Tables."""
        return self._folder

    @property
    def place(self) -> "StoreTables":
        """See Tables."""
        return self

    @property
    def names(self) -> frozenset[str]:
        """Return the paths of the data files inside the version."""
        return frozenset(self._names.values())

    def prepare(self, plan: ExportPlan, header: Header) -> list[ShardTask]:  # noqa: ARG002 - the signature of Tables
        """Start the uploads, or resume those of an earlier run. Return the shards whose parts are missing."""
        self._sizes = {stack.file: stack.size for stack in plan.stacks}
        self._parts = dict(parts_of(plan))
        self._by_index = {part.batch.index: part for parts in self._parts.values() for part in parts}
        with failing(self._root.path):
            for file, size in self._sizes.items():
                _make_holes(self._folder / file, size)
                self._begin(file)
            self._remove_others()
            self._lease.update(uploads=self._uploads, finished=self._known)
        return [task for task in plan.shards if task.index not in self._known]

    def _begin(self, file: str) -> None:
        """Take over the recorded upload of `file` if it is still valid, or start a new one."""
        key, record = self._key(file), self._lease.record
        upload = record.uploads.get(file)
        there = self._bucket.parts(key, upload.id) if upload and upload.key == key else None
        if upload and there is None and _is_object(self._bucket, key, self._recorded_tags(file), self._sizes[file]):
            there = {part.number: Part(_tag_of(part, record.finished), part.size) for part in self._parts[file]}
        if upload is None or there is None:
            upload, there = Upload(key, self._bucket.begin_upload(key)), {}
        self._uploads[file] = upload
        for part in self._parts[file]:
            tag = _tag_of(part, record.finished)
            if tag and there.get(part.number) == Part(tag, part.size):
                self._known |= {shard.index: record.finished[shard.index] for shard in part.batch.shards}

    def _recorded_tags(self, file: str) -> list[str]:
        finished = self._lease.record.finished
        return [_tag_of(part, finished) for part in self._parts[file]]

    def _remove_others(self) -> None:
        """Remove all other objects and uploads below the version, which an interrupted export left."""
        prefix = self._root.key(str(self._lease.version)) + "/"
        kept = {upload.key for upload in self._uploads.values()}
        self._bucket.delete([key for key in self._bucket.keys(prefix) if key not in kept])
        ids = {(upload.key, upload.id) for upload in self._uploads.values()}
        for key, upload_id in self._bucket.uploads(prefix):
            if (key, upload_id) not in ids:
                self._bucket.abort_upload(key, upload_id)

    def batches(self, tasks: Sequence[ShardTask]) -> list[Batch]:
        """See Place. Each batch is a part."""
        asked = {task.index for task in tasks}
        return [part.batch for part in self._by_index.values() if part.batch.index in asked]

    def where(self, batch: Batch) -> Where:
        """See Place."""
        part = self._by_index[batch.index]
        upload = self._uploads[part.file]
        with failing(self._root.path):
            url = self._bucket.sign_part(upload.key, upload.id, part.number)
        return {"url": url, "shown": f"s3://{self._bucket.name}/{upload.key}, part {part.number}"}

    @property
    def hint(self) -> str:
        """See Place. Empty: the nodes need no common file system."""
        return ""

    @contextlib.contextmanager
    def recording(self) -> Iterator[LeaseRenewer]:
        """See Tables."""
        yield self._lease
        with failing(self._root.path):
            self._lease.update()

    def results(self, results: Sequence[ShardResult]) -> list[ShardResult]:
        """See Tables."""
        known = [dataclasses.replace(result, is_reused=True) for result in self._known.values()]
        self._results = {result.index: result for result in (*known, *results)}
        return list(self._results.values())

    def complete(self) -> None:
        """Complete every upload. Raises ExportError if the resulting object has the wrong size."""
        for file, upload in self._uploads.items():
            tags, size = [_tag_of(part, self._results) for part in self._parts[file]], self._sizes[file]
            try:
                self._bucket.complete_upload(upload.key, upload.id, tags)
            except FileNotFoundError:  # completed before, and then the answer was lost or the export was killed
                if not _is_object(self._bucket, upload.key, tags, size):
                    raise
            found = self._bucket.head(upload.key)
            if found is None or found.size != size:
                raise ExportError(
                    f"data file s3://{self._bucket.name}/{upload.key}: it has {found.size if found else 0} bytes, "
                    f"but its parts have {size}. Export again."
                )

    def _key(self, file: str) -> str:
        return self._root.key(f"{self._lease.version}/{self._names[file]}")

    @property
    def _bucket(self) -> Bucket:
        return self._root.bucket


def _tag_of(part: StackPart, results: Mapping[int, ShardResult]) -> str:
    """Return the ETag of the part if all its shards have the same one; empty otherwise."""
    tags = {results[shard.index].tag if shard.index in results else "" for shard in part.batch.shards}
    return tags.pop() if len(tags) == 1 else ""


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


def _make_holes(path: Path, size: int) -> None:
    """Create a sparse file of `size` bytes. It stands for the object while the bundle is assembled."""
    with open(path, "wb") as file:
        os.truncate(file.fileno(), size)
