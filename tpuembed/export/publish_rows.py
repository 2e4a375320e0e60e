"""Publishes the rows of a version to Redis: streams arrays that Redis does not have, then switches to the version by one command.

An array is named by its content. So an overlay writes its changed rows alone, because its base's rows are there, and a version that
was interrupted resumes after the last chunk that was written.
"""

import contextlib
import dataclasses
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import google_crc32c
import numpy as np

from tpuembed.checkpoint.tools import find_export
from tpuembed.errors import ConfigError, ExportError, reason
from tpuembed.export.publish.folder import locked
from tpuembed.files import FilePath, as_path, open_bytes
from tpuembed.manifest import MANIFEST_PATH, ArrayEntry, Manifest
from tpuembed.row_store import ArrayRecord, PublishedModel, VersionRecord, connect
from tpuembed.row_store.client import Keys
from tpuembed.row_store.keys import buckets_of
from tpuembed.saved_model import check_sizes

__all__ = ["PublishRowsReport", "publish_rows"]

_CHUNK_BYTES: Final = 4 << 20
_CHUNK_ROWS: Final = 1 << 16
_SECONDS: Final = 60.0
"""How long a chunk is retried. A master that fails is replaced within 15 to 30 seconds by default."""
_LEASE_SECONDS: Final = 120.0
"""A publish that died keeps others away for so long."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishRowsReport:
    """The result of `publish_rows`.

    Attributes:
        model: its name in Redis.
        version: the current version now.
        url: of Redis, without a password.
        rows_written: rows of tables that were written now.
        bytes_written: bytes of these rows, and of the indexes of an overlay.
        bytes_reused: bytes of arrays, or parts of them, that Redis had already.
        removed: older versions that were removed.
    """

    model: str
    version: int
    url: str
    rows_written: int
    bytes_written: int
    bytes_reused: int
    removed: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return dataclasses.asdict(self)


def publish_rows(
    model_dir: str | FilePath,
    url: str,
    *,
    version: int | None = None,
    name: str | None = None,
    keep: int = 2,
    rewrite: bool = False,
    password: str | None = None,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> PublishRowsReport:
    """Write the rows of a version of `model_dir` to Redis, and make it the current version.

    Args:
        model_dir: of an export of lookups, on a disk or in a store.
        url: redis://[USER@]HOST:PORT[/DB], or rediss:// for TLS. A cluster is recognised.
        version: its number; None for the highest.
        name: of the model in Redis; None for the name of the folder.
        keep: how many of the versions that were published last stay in Redis.
        rewrite: write all rows again, also those that Redis should have.
        password: of Redis.
        on_progress: called with (bytes done, bytes in total).

    Raises:
        ConfigError: there is no such version; it is not an export of lookups by row numbers; the URL has a password.
        ExportError: a file of the version cannot be read or is damaged; another process publishes the model.
        RowStoreError: Redis cannot be reached or refuses. A repetition resumes.
    """
    if keep < 1:
        raise ConfigError(f"keep must be at least 1, got {keep}.")
    folder, manifest = _find(as_path(model_dir), version)
    number = int(folder.name)
    _check(folder, manifest)
    store = connect(url, password)
    # The lock keeps prune from removing the version.
    held = locked(folder, fcntl.LOCK_SH) if isinstance(folder, Path) else contextlib.nullcontext()
    with contextlib.closing(store), held:
        model = PublishedModel(store, name or folder.parent.name)
        with _lease(model) as renew:
            model.begin()
            text = (folder / MANIFEST_PATH).read_text(encoding="utf-8")
            record = VersionRecord(number=number, published=time.time(), text=text, manifest=manifest)
            return _Publishing(model, folder, record).run(keep, rewrite, renew, on_progress)


def _find(model_dir: FilePath, version: int | None) -> tuple[FilePath, Manifest]:
    if version is None:
        export = find_export(model_dir)
        if export is None or not export[0].name.isdecimal():
            raise ConfigError(
                f"MODEL_DIR {model_dir}: has no version that tpuembed exported. Export one, or name its folder."
            )
        return export[0].absolute() if isinstance(export[0], Path) else export[0], export[1]
    folder = model_dir / str(version)
    manifest = Manifest.read(folder)
    if manifest is None:
        raise ConfigError(
            f"MODEL_DIR {model_dir}: has no version {version} that tpuembed exported. Choose another version."
        )
    return folder.absolute() if isinstance(folder, Path) else folder, manifest


def _check(folder: FilePath, manifest: Manifest) -> None:
    """Raise ConfigError unless Redis can answer for the version: the lookups of row numbers."""
    if manifest.retrieval is not None:
        raise ConfigError(
            f"export {folder}: searches candidates, and Redis has rows alone. Serve it with tpuembed serve."
        )
    if not manifest.features:
        raise ConfigError(
            f"export {folder}: is a whole model, and Redis has rows alone. Export lookups with a serving_config."
        )
    if named := [feature.name for feature in manifest.features if feature.names]:
        raise ConfigError(
            f"export {folder}: feature {named[0]!r} takes names of rows, and rows in Redis have numbers alone. Serve it with "
            "tpuembed serve, or export the feature with row numbers."
        )
    check_sizes(folder, manifest)


@contextlib.contextmanager
def _lease(model: PublishedModel) -> Iterator[Callable[[], None]]:
    """Lease the model for one publish at a time. Yields a function that renews the lease."""
    from redis.exceptions import LockError

    lock = model.store.client.lock(f"{model.key}:lease", timeout=_LEASE_SECONDS, thread_local=False)
    if not lock.acquire(blocking=False):
        raise ExportError(
            f"Redis at {model.store.url}: another process publishes model {model.name}. Wait until it has ended. If it died, "
            f"wait {_LEASE_SECONDS:.0f} seconds."
        )
    left = [time.monotonic() + _LEASE_SECONDS / 4]

    def renew() -> None:
        if time.monotonic() < left[0]:
            return
        try:
            lock.reacquire()
        except LockError:
            raise ExportError(
                f"Redis at {model.store.url}: the lease of model {model.name} was lost: a chunk took longer than "
                f"{_LEASE_SECONDS:.0f} seconds. Publish again."
            ) from None
        left[0] = time.monotonic() + _LEASE_SECONDS / 4

    try:
        yield renew
    finally:
        with contextlib.suppress(Exception):  # it ends by itself
            lock.release()


class _Publishing:
    """One publish."""

    def __init__(self, model: PublishedModel, folder: FilePath, version: VersionRecord) -> None:
        self._model, self._store, self._folder, self._version = model, model.store, folder, version
        stacks = version.manifest.stacks
        self._entries = {array.name: array for stack in stacks for array in stack.arrays}
        self._indexes = {stack.overlay.words.name for stack in stacks if stack.overlay is not None}
        self._rows = self._bytes = self._done = 0

    def run(
        self, keep: int, rewrite: bool, renew: Callable[[], None], on_progress: Callable[[int, int], None]
    ) -> PublishRowsReport:
        self._check_same()
        arrays = self._version.arrays
        total = sum(record.size for record in arrays.values())

        def on_chunk() -> None:
            renew()
            on_progress(self._done, total)

        for name, record in arrays.items():
            before = self._model.array(record.id)
            if before is not None and before.emptied != record:
                raise ExportError(
                    f"Redis at {self._store.url}: array {record.id} of model {self._model.name} is {before}, but that of "
                    f"{self._folder} is {record}. Publish under another name."
                )
            self._write(self._entries[name], before or record, rewrite, on_chunk)
        renew()
        self._model.put_current(self._version)
        removed = self._remove_old(keep, renew)
        return PublishRowsReport(
            model=self._model.name,
            version=self._version.number,
            url=self._store.url,
            rows_written=self._rows,
            bytes_written=self._bytes,
            bytes_reused=total - self._bytes,
            removed=removed,
        )

    def _check_same(self) -> None:
        """Raise ConfigError if the number is or was that of another version: a server would take one for the other."""
        number, digest = self._version.number, self._model.digest(self._version.number)
        if digest is not None and digest != self._version.digest:
            raise ConfigError(
                f"Redis at {self._store.url}: version {number} of model {self._model.name} is or was another export. Its "
                f"manifest has the digest {digest}, and that of {self._folder} has {self._version.digest}. Export anew, or "
                "publish under another name."
            )

    def _write(self, array: ArrayEntry, record: ArrayRecord, rewrite: bool, on_chunk: Callable[[], Any]) -> None:
        """Write the rows of an array that Redis does not have. Each chunk is recorded after it is written.

        Rows that servers may read are written again only from a file whose checksum is right.
        """
        is_read = record.is_whole
        if is_read and rewrite:
            self._check(array, record, self._checksum(array, record))
        start, checksum = (0, 0) if rewrite else (record.written, record.written_crc32c)
        keys = self._model.keys_of(record)
        self._done += min(start * record.row_bytes, record.size)
        for first, stop, chunk in self._chunks(array, record, start):
            checksum = google_crc32c.extend(checksum, chunk.tobytes())
            if stop == record.rows:
                self._check(array, record, checksum)
            self._write_chunk(keys, first, stop, record, chunk)
            if not is_read:
                self._model.put_array(dataclasses.replace(record, written=stop, written_crc32c=checksum))
            self._rows += 0 if array.name in self._indexes else stop - first
            self._bytes, self._done = self._bytes + len(chunk), self._done + len(chunk)
            on_chunk()

    def _checksum(self, array: ArrayEntry, record: ArrayRecord) -> int:
        checksum = 0
        for _, _, chunk in self._chunks(array, record, 0):
            checksum = google_crc32c.extend(checksum, chunk.tobytes())
        return checksum

    def _check(self, array: ArrayEntry, record: ArrayRecord, checksum: int) -> None:
        """Raise ExportError unless `checksum` is that of the manifest. Rows of a damaged file are written again by a repetition."""
        if checksum == record.crc32c:
            return
        if not record.is_whole:
            self._model.put_array(record.emptied)
        raise ExportError(
            f"export {self._folder}: the rows in {array.file} have the CRC32C {checksum:#010x}, but the manifest has "
            f"{record.crc32c:#010x}. Copy the version again, or export it again."
        )

    def _chunks(self, array: ArrayEntry, record: ArrayRecord, start: int) -> Iterator[tuple[int, int, Any]]:
        """Yield (first row, row after the last, bytes) of the rows of an array from `start` on."""
        step = max(1, min(_CHUNK_BYTES // record.row_bytes, _CHUNK_ROWS))
        try:
            with contextlib.closing(open_bytes(self._folder / array.file)) as file:
                for first in range(start, record.rows, step):
                    stop = min(first + step, record.rows)
                    chunk = np.empty(min(stop * record.row_bytes, record.size) - first * record.row_bytes, np.uint8)
                    file.read_into(array.offset + first * record.row_bytes, chunk.data)
                    yield first, stop, chunk
        except (OSError, EOFError) as error:
            raise ExportError(
                f"export {self._folder}: {array.file} cannot be read: {reason(error)}. Publish again."
            ) from None

    def _write_chunk(self, keys: Any, start: int, stop: int, record: ArrayRecord, chunk: Any) -> None:
        rows = np.arange(start, stop, dtype=np.int64)
        whole = len(chunk) // record.row_bytes
        names, buckets = keys.of(rows), buckets_of(rows)
        if whole:
            values = chunk[: whole * record.row_bytes].reshape(whole, record.row_bytes)
            self._store.write(Keys(names[:whole], buckets[:whole]), values, _SECONDS)
        if whole < len(rows):  # the last piece of an index
            values = chunk[whole * record.row_bytes :][None]
            self._store.write(Keys(names[whole:], buckets[whole:]), values, _SECONDS)

    def _remove_old(self, keep: int, renew: Callable[[], None]) -> tuple[int, ...]:
        """Remove all versions but the `keep` that were published last, and the arrays that none of these has."""
        found = [version for number in self._model.numbers() if (version := self._model.version(number)) is not None]
        found.sort(key=lambda one: one.published)
        kept = [*found[max(0, len(found) - keep) :], self._version]
        numbers = {one.number for one in kept}
        removed = tuple(sorted(one.number for one in found if one.number not in numbers))
        if removed:
            self._model.remove(*(f"version:{number}" for number in removed))
        needed = {record.id for one in kept for record in one.arrays.values()}
        for id_, record in self._model.arrays().items():
            if id_ not in needed:
                self._model.put_array(record.emptied)  # a removal that is interrupted leaves no array that seems whole
                for start in range(0, record.rows, _CHUNK_ROWS):
                    rows = np.arange(start, min(start + _CHUNK_ROWS, record.rows), dtype=np.int64)
                    self._model.check_writer()  # the rows may be another publish's by now
                    self._store.remove(Keys.of([(self._model.keys_of(record), rows)]), _SECONDS)
                    renew()
                self._model.remove(f"array:{id_}")
        return removed
