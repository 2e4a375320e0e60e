"""Writes versions into an object store.

TensorFlow's files are small and go to a temporary folder of this machine. Table data goes directly to uploads, which no
listing shows. The commit completes the uploads and writes the other files. It writes `saved_model.pb` last, and only if
that object does not exist yet. During the commit, servers see a folder without it, which they cannot load.
"""

import contextlib
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tpuembed.errors import ConfigError, ExportError, warn
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan.plan import ExportPlan, ShardTask
from tpuembed.export.publish.layouts import Layout, choose_layout, data_file_names
from tpuembed.export.publish.store.lease import (
    LeaseRenewer,
    check_free,
    list_versions,
    remove_unfinished,
    reserve_version,
)
from tpuembed.export.publish.store.parts import StackPart, check_sizes, parts_of
from tpuembed.export.publish.store.record import StoreModelDir, Upload
from tpuembed.export.publish.version_writer import VersionWriter, check_version, naming_model_dir
from tpuembed.export.stream.shard import Batch, ShardResult, Source, Target
from tpuembed.files import UrlPath, in_parallel
from tpuembed.files.bucket import Bucket, Part, md5
from tpuembed.saved_model import GRAPH_FILE

__all__ = ["StoreWriter"]


class StoreWriter(VersionWriter):
    """Writes a version into a bucket. Data files are uploads, started before the first part is made."""

    model_dir: UrlPath

    def __init__(self, model_dir: UrlPath, plan: ExportPlan, options: ExportOptions, source: Source) -> None:
        super().__init__(model_dir, plan, options, source)
        self._parts: Mapping[str, list[StackPart]] = {}
        self._uploads: dict[str, Upload] = {}
        self._known: dict[int, ShardResult] = {}
        self._results: dict[int, ShardResult] = {}
        self._is_visible = self._is_committing = False

    @functools.cached_property
    def _root(self) -> StoreModelDir:
        with naming_model_dir(self.model_dir):
            return StoreModelDir(self.model_dir, Bucket(self.model_dir.bucket))

    def check(self) -> None:
        """See VersionWriter.check. A store has no limit on space."""
        check_version(self.options.version)
        check_sizes(self.plan)
        if self.options.layout == "mmap" and self.options.serving_root is None:
            raise ConfigError(
                f"MODEL_DIR {self.model_dir}: a server cannot map files of a store. Name the folder that versions "
                "will be copied to, or mounted at, with serving_root, or choose layout "
                "'variables'."
            )
        root = self._root
        with naming_model_dir(self.model_dir):
            check_free(root, self.options.version, list_versions(root))

    @property
    def layout(self) -> Layout:
        """See VersionWriter.layout."""
        return choose_layout(self.options.layout, None, self.options.serving_root)

    def reserve(self) -> None:
        """Take over the version that the same export left, or reserve a new one. Its lease is renewed from now on."""
        root = self._root
        with naming_model_dir(self.model_dir):
            reserved, self.kept = reserve_version(
                root, self.options.version, self.header, restart=not self.options.resume
            )
        self._folder = Path(tempfile.mkdtemp(prefix="tpuembed-export-"))
        self.path, self.tables = self._folder / "version", self._folder / "tables"
        for folder in (self.path, self.tables):
            folder.mkdir()
        self._lease = LeaseRenewer(root, reserved)
        self._lease.start()

    def open(self) -> Sequence[ShardTask]:
        """Start the uploads, or resume those of an earlier run. Return the shards whose parts are missing."""
        self._names = data_file_names(self.path, self.plan.stacks)
        self._parts = parts_of(self.plan)
        with naming_model_dir(self.model_dir):
            for stack in self.plan.stacks:
                with open(self.tables / stack.file, "wb") as file:  # sparse: it stands for the object in `assemble`
                    file.truncate(stack.size)
                self._begin(stack.file, stack.size)
            self._remove_others()
            self._lease.update(uploads=self._uploads, finished=self._known)
        return [task for task in self.plan.shards if task.index not in self._known]

    def _begin(self, file: str, size: int) -> None:
        """Take over the recorded upload of `file` if it is still valid, or start a new one."""
        key, record = self._key(self._names[file]), self._lease.record
        upload = record.uploads.get(file)
        there = self._bucket.parts(key, upload.id) if upload and upload.key == key else None
        tags = [_tag_of(part, record.finished) for part in self._parts[file]]
        if upload and there is None and _is_object(self._bucket, key, tags, size):
            there = {part.number: Part(tag, part.size) for part, tag in zip(self._parts[file], tags, strict=True)}
        if upload is None or there is None:
            upload, there = Upload(key, self._bucket.begin_upload(key)), {}
        self._uploads[file] = upload
        for part, tag in zip(self._parts[file], tags, strict=True):
            if tag and there.get(part.number) == Part(tag, part.size):
                self._known |= {shard.index: record.finished[shard.index] for shard in part.batch.shards}

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
        """See VersionWriter.batches. A batch is a part."""
        asked = {task.index for task in tasks}
        return [part.batch for part in self._by_index.values() if part.batch.index in asked]

    def target(self, batch: Batch) -> Target:
        """See VersionWriter.target."""
        part = self._by_index[batch.index]
        upload = self._uploads[part.file]
        with naming_model_dir(self.model_dir):
            url = self._bucket.sign_part(upload.key, upload.id, part.number)
        return Target(kind="part", place=url, shown=f"s3://{self._bucket.name}/{upload.key}, part {part.number}")

    @functools.cached_property
    def _by_index(self) -> Mapping[int, StackPart]:
        """Return the parts by the index of their first shard."""
        return {part.batch.index: part for parts in self._parts.values() for part in parts}

    @contextlib.contextmanager
    def recording(self) -> Iterator[Callable[[ShardResult], None]]:
        """See VersionWriter.recording."""
        yield self._lease.add
        with naming_model_dir(self.model_dir):
            self._lease.update()

    def results(self, streamed: Sequence[ShardResult]) -> Sequence[ShardResult]:
        """See VersionWriter.results."""
        known = [dataclasses.replace(result, is_reused=True) for result in self._known.values()]
        self._results = {result.index: result for result in (*known, *streamed)}
        return list(self._results.values())

    @property
    def finished(self) -> int:
        """See VersionWriter.finished."""
        return len(self._lease.record.finished)

    def kept_after(self, error: BaseException) -> int:
        """See VersionWriter.kept_after. Nothing is kept of a version that is being committed, or was lost."""
        kept = 0 if self._is_committing else super().kept_after(error)
        return 0 if kept and (self._lease.is_taken or self._lease.is_gone) else kept

    def publish(self, settle: Callable[[str], None] = lambda _: None) -> UrlPath:
        """Write the version, `saved_model.pb` last, and return its URL.

        Args:
            settle: called with the version's name before anything of it is written.

        Raises:
            ExportError: a file cannot be written, or another export has the version.
        """
        version, graph = self._lease.version, GRAPH_FILE.as_posix()
        settle(str(version))
        files = {path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file()}
        with naming_model_dir(self.model_dir):
            self._lease.update()
            self._is_committing = True
            self._complete()
            others = sorted(files - {*self._names.values(), graph})
            in_parallel(lambda name: self._bucket.put(self._key(name), self.path / name), others)
            self._lease.update()
            try:
                self._bucket.create(self._key(graph), (self.path / GRAPH_FILE).read_bytes())
            except FileExistsError:
                raise ExportError(
                    f"MODEL_DIR {self.model_dir}: version {version} exists: another program wrote it meanwhile. "
                    "Export again."
                ) from None
            self._is_visible = True
        return self.model_dir / str(version)

    def _complete(self) -> None:
        """Complete every upload. Raises ExportError if the resulting object has the wrong size."""
        for stack in self.plan.stacks:
            upload, size = self._uploads[stack.file], stack.size
            tags = [_tag_of(part, self._results) for part in self._parts[stack.file]]
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

    def abandon(self, *, keep: bool) -> None:
        """See VersionWriter.abandon. A failure to remove something is a warning, because the next export removes it."""
        self._lease.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._leave(keep=keep)
        except (OSError, ExportError) as failure:
            warn(
                f"MODEL_DIR {self.model_dir}: the rest of version {self._lease.version} cannot be removed: "
                f"{str(failure).removesuffix('.')}. The next export to this MODEL_DIR removes it.",
            )
        finally:
            owner = self._lease.record.owner
            if owner is not None:
                owner.end()

    def _leave(self, *, keep: bool) -> None:
        version = self._lease.version
        if self._is_visible:
            self._bucket.delete([self._root.record_key(version)])
        elif self._lease.is_taken:
            return  # everything belongs to the other export
        elif self._lease.is_gone:
            for upload in self._lease.record.uploads.values():
                self._bucket.abort_upload(upload.key, upload.id)
        elif keep:
            self._lease.update(owner=None)
        else:
            self._lease.update()  # raises if another export has taken the version
            remove_unfinished(self._root, version, self._lease.record)

    def _key(self, name: str) -> str:
        return self._root.key(f"{self._lease.version}/{name}")

    @property
    def _bucket(self) -> Bucket:
        return self._root.bucket


def _tag_of(part: StackPart, results: Mapping[int, ShardResult]) -> str:
    """Return the ETag of the part if all its shards have the same one and can be reused; empty otherwise."""
    found = [(results.get(shard.index), shard) for shard in part.batch.shards]
    tags = {result.tag if result and result.fulfils(shard) else "" for result, shard in found}
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
