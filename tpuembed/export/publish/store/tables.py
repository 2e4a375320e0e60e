"""Data files as uploads: begun before the first part is made, completed when the whole version is proven."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tpuembed.errors import ExportError
from tpuembed.export.plan.plan import ExportPlan, ShardTask
from tpuembed.export.publish.store.failing import failing
from tpuembed.export.publish.store.heartbeat import Keeper
from tpuembed.export.publish.store.parts import StackPart, parts_of
from tpuembed.export.publish.store.record import Upload
from tpuembed.export.publish.store.version_lease import Root
from tpuembed.export.stream.batch import Batch, Where
from tpuembed.export.stream.resume_log import Header
from tpuembed.export.stream.shard import ShardResult
from tpuembed.files.bucket import Bucket, Part, md5

__all__ = ["StoreTables"]


class StoreTables:
    """The data files of one version; a `Tables`, and the `Place` of its parts."""

    def __init__(self, root: Root, keeper: Keeper, folder: Path, names: Mapping[str, str]) -> None:
        """In MODEL_DIR `root`, the file `StackPlan.file` will be `names[it]` of the version; `folder` is for files of holes."""
        self._root, self._keeper, self._folder, self._names = root, keeper, folder, names
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
        """Of the data files inside the version."""
        return frozenset(self._names.values())

    def prepare(self, plan: ExportPlan, header: Header) -> list[ShardTask]:  # noqa: ARG002 - as Tables
        """Begin the uploads, or go on with those of an earlier export; the shards whose parts are not there."""
        self._sizes = {stack.file: stack.size for stack in plan.stacks}
        self._parts = dict(parts_of(plan))
        self._by_index = {part.batch.index: part for parts in self._parts.values() for part in parts}
        with failing(self._root.path):
            for file, size in self._sizes.items():
                _make_holes(self._folder / file, size)
                self._begin(file)
            self._remove_others()
            self._keeper.update(uploads=self._uploads, finished=self._known)
        return [task for task in plan.shards if task.index not in self._known]

    def _begin(self, file: str) -> None:
        """Take over the upload of `file` where its record is right, or begin another one."""
        key, record = self._key(file), self._keeper.record
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
        finished = self._keeper.record.finished
        return [_tag_of(part, finished) for part in self._parts[file]]

    def _remove_others(self) -> None:
        """Whatever else lies, or is uploaded, below the version: of an export that was killed."""
        prefix = self._root.key(str(self._keeper.version)) + "/"
        ours = {upload.key for upload in self._uploads.values()}
        self._bucket.delete([key for key in self._bucket.keys(prefix) if key not in ours])
        ids = {(upload.key, upload.id) for upload in self._uploads.values()}
        for key, upload_id in self._bucket.uploads(prefix):
            if (key, upload_id) not in ids:
                self._bucket.abort_upload(key, upload_id)

    def batches(self, tasks: Sequence[ShardTask]) -> list[Batch]:
        """See Place: a part each."""
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
        """See Place: its nodes need to see nothing."""
        return ""

    @contextlib.contextmanager
    def recording(self) -> Iterator[Keeper]:
        """See Tables."""
        yield self._keeper
        with failing(self._root.path):
            self._keeper.update()

    def results(self, results: Sequence[ShardResult]) -> list[ShardResult]:
        """See Tables."""
        known = [dataclasses.replace(result, is_reused=True) for result in self._known.values()]
        self._results = {result.index: result for result in (*known, *results)}
        return list(self._results.values())

    def complete(self) -> None:
        """Have every data file be an object; ExportError where it is not of its size then."""
        for file, upload in self._uploads.items():
            tags, size = [_tag_of(part, self._results) for part in self._parts[file]], self._sizes[file]
            try:
                self._bucket.complete_upload(upload.key, upload.id, tags)
            except FileNotFoundError:  # it was completed before, and the answer was lost, or the export killed
                if not _is_object(self._bucket, upload.key, tags, size):
                    raise
            found = self._bucket.head(upload.key)
            if found is None or found.size != size:
                raise ExportError(
                    f"data file s3://{self._bucket.name}/{upload.key}: it has {found.size if found else 0} bytes and its parts "
                    f"{size}; export again"
                )

    def _key(self, file: str) -> str:
        return self._root.key(f"{self._keeper.version}/{self._names[file]}")

    @property
    def _bucket(self) -> Bucket:
        return self._root.bucket


def _tag_of(part: StackPart, results: Mapping[int, ShardResult]) -> str:
    """The ETag of the part that all its shards lie in; empty where they do not."""
    tags = {results[shard.index].tag if shard.index in results else "" for shard in part.batch.shards}
    return tags.pop() if len(tags) == 1 else ""


def _is_object(bucket: Bucket, key: str, tags: Sequence[str], size: int) -> bool:
    """Whether the object is what an upload of parts with these ETags makes: the MD5 of their MD5s, and their number.

    Where ETags are something else, as of encrypted parts, it is not known to be.
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
    """A file of `size` bytes that takes no room: it stands for the object while the bundle is put together."""
    with open(path, "wb") as file:
        os.truncate(file.fileno(), size)
