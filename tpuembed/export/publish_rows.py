"""Publishes a version to Redis: its rows, and then a version without tables, the front, that servers load.

An array is named by its content. So an overlay writes its changed rows alone, because its base's rows are there, and a publish
that was interrupted resumes after the last chunk that was written.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import google_crc32c
import numpy as np

from tpuembed.errors import ConfigError, ExportError, reason
from tpuembed.export.front import write_front
from tpuembed.export.publish.folder import locked, publish_folder, temporary_staging
from tpuembed.export.publish.layouts import choose_layout
from tpuembed.export.publish.version_writer import naming_model_dir
from tpuembed.export.report import VersionReport
from tpuembed.export.retention.listing import find_version, local_model_dir, version_folders
from tpuembed.files import FilePath, as_path, open_bytes
from tpuembed.formats.saved_model import check_sizes
from tpuembed.manifest import ArrayEntry, Manifest, RowStoreEntry
from tpuembed.row_store import PUBLISHER, RowKeys, RowStore, check_model, connect, hash_of

__all__ = ["PublishRowsReport", "publish_rows"]

_CHUNK_BYTES: Final = 4 << 20
_CHUNK_ROWS: Final = 1 << 16
_LEASE_SECONDS: Final = 60.0
"""A publish that died keeps others away for so long."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishRowsReport(VersionReport):
    """The result of `publish_rows`, with the path of the front.

    Attributes:
        model: the name in Redis.
        url: of Redis, without a password.
        rows_written, bytes_written: the rows that were written now.
        bytes_reused: bytes of rows that Redis had already.
        removed: older versions that were removed.
        newest: the highest version in `front_dir`.
    """

    model: str
    url: str
    rows_written: int
    bytes_written: int
    bytes_reused: int
    removed: tuple[int, ...]
    newest: int


def publish_rows(
    model_dir: str | FilePath,
    url: str,
    front_dir: str | FilePath,
    *,
    version: int | None = None,
    name: str | None = None,
    keep: int = 2,
    rewrite: bool = False,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> PublishRowsReport:
    """Write the rows of a version of `model_dir` to Redis, and the version without its tables to `front_dir`.

    Args:
        model_dir: a folder of this machine.
        url: redis://[USER@]HOST:PORT[/DB], or rediss:// for TLS. A cluster is recognised.
        front_dir: the MODEL_DIR of the versions without tables, for servers with --row-store.
        version: its number; None for the highest.
        name: of the model in Redis; None for the name of the folder `front_dir`.
        keep: how many of the versions that were published last stay in `front_dir` and in Redis.
        rewrite: write all rows again, also those that Redis should have.
        on_progress: called with (bytes done, bytes in total).

    Raises:
        ConfigError: there is no such version, or it cannot be looked up without its tables; the URL has a password.
        ExportError: a file of the version cannot be read or is damaged; `front_dir` cannot be written, or has another export
            of this number; another process publishes the model.
        RowStoreError: Redis cannot be reached or refuses. A repetition resumes.
    """
    if keep < 1:
        raise ConfigError(f"keep must be at least 1, got {keep}.")
    front = as_path(front_dir)
    if not isinstance(front, Path):
        raise ConfigError(f"FRONT_DIR {front}: is in a store. Name a folder of this machine, and copy it to the store.")
    folder = find_version(local_model_dir(model_dir, "publish"), version).absolute()
    manifest = Manifest.read(folder)
    if manifest is None:
        raise ConfigError(f"version {folder}: tpuembed did not export it. Choose another version.")
    front = front.absolute()
    if front.resolve().is_relative_to(folder.parent.resolve()):
        raise ConfigError(f"FRONT_DIR {front}: is in MODEL_DIR {folder.parent}. Name a folder elsewhere.")
    if front.exists() and not front.is_dir():
        raise ConfigError(f"FRONT_DIR {front}: is a file. Name a folder.")
    model = check_model(name or front.name)
    stored = _stored_arrays(folder, manifest)
    check_sizes(folder, manifest)
    store = connect(url)
    with (
        contextlib.closing(store),
        naming_model_dir(front),
        locked(folder, fcntl.LOCK_SH),
    ):  # no prune removes the version
        front.mkdir(parents=True, exist_ok=True)
        with _lease(store, model) as token:
            return _Published(store, model, front, token).run(folder, manifest, stored, keep, rewrite, on_progress)


def _stored_arrays(folder: Path, manifest: Manifest) -> list[tuple[ArrayEntry, int]]:
    """Return the arrays that go to Redis, with the bytes of a row: of all stacks but those that the model reads whole.

    Raises:
        ConfigError: a server could not look up without the tables.
    """
    given = manifest.from_activations
    fault = remedy = ""
    if manifest.row_store is not None:
        fault, remedy = "its rows are in Redis", "Name the MODEL_DIR that it was published from"
    elif manifest.retrieval is not None:
        fault, remedy = "it searches candidates, and Redis has rows alone", "Serve it with tpuembed serve"
    elif not manifest.features and given.left_out:
        fault = f"it is a whole model without the signature from_activations: {given.left_out}"
        remedy = "Change the model, or serve the export with its tables"
    if fault:
        raise ConfigError(f"export {folder}: cannot be published: {fault}. {remedy}.")
    whole = {table.stack for table in manifest.tables if table.name in given.whole_tables}
    stacks = [stack for stack in manifest.stacks if stack.name not in whole]
    return [(array, stack.row_bytes) for stack in stacks for array in stack.arrays[:2]]


@contextlib.contextmanager
def _lease(store: RowStore, model: str) -> Iterator[str]:
    """Lease the model for one publish at a time. Yields the token of this publish, which the model's hash has from then on.

    A thread renews the lease while the process runs. A process that was stopped for longer, or whose Redis has lost its content,
    finds another token, or none, at its next `RowStore.note`.
    """
    from redis.exceptions import LockError, RedisError

    lock = store.client.lock(f"{hash_of(model)}:lease", timeout=_LEASE_SECONDS, thread_local=False)
    with store.refusals():
        is_held = lock.acquire(blocking=False)
    if not is_held:
        raise ExportError(
            f"Redis at {store.url}: another process publishes model {model}. Wait until it has ended. If it died, wait "
            f"{_LEASE_SECONDS:.0f} seconds."
        )
    token, ended = secrets.token_hex(8), threading.Event()

    def renew() -> None:
        while not ended.wait(_LEASE_SECONDS / 4):
            with contextlib.suppress(LockError, RedisError, OSError):  # the token tells whether it was lost
                lock.reacquire()

    renewing = threading.Thread(target=renew, name="publish-lease", daemon=True)
    try:
        with store.refusals():
            store.client.hset(hash_of(model), PUBLISHER, token)
        renewing.start()
        yield token
    finally:
        ended.set()
        if renewing.ident is not None:
            renewing.join()
        with contextlib.suppress(Exception):  # it ends by itself
            lock.release()


class _Published:
    """A model in Redis and in its FRONT_DIR, while one process publishes."""

    def __init__(self, store: RowStore, model: str, front_dir: Path, token: str) -> None:
        self._store, self._model, self._front_dir, self._token = store, model, front_dir, token
        self._rows = self._bytes = self._done = 0

    def run(
        self,
        folder: Path,
        manifest: Manifest,
        stored: list[tuple[ArrayEntry, int]],
        keep: int,
        rewrite: bool,
        on_progress: Callable[[int, int], None],
    ) -> PublishRowsReport:
        number = int(folder.name)
        total = sum(array.size for array, _ in stored)
        digests = {array.name: _digest(folder, array, row_bytes) for array, row_bytes in stored}
        ids = {name: digest.id for name, digest in digests.items()}
        with temporary_staging(self._front_dir, "publish", str(number)) as staging:
            front = write_front(folder, manifest, RowStoreEntry(name=self._model, arrays=ids), staging / "version")
            self._check_front(number, front)
            if not rewrite:
                self._check_redis(number, front)
            for array, row_bytes in stored:
                self._write(
                    folder, array, digests[array.name], row_bytes, rewrite, lambda: on_progress(self._done, total)
                )
            self._note(f"version:{number}", {"published": time.time(), "arrays": sorted(set(ids.values()))})
            path = self._front_dir / str(number)
            if not path.is_dir():
                layout = choose_layout(front.layout, self._front_dir, None)
                path = publish_folder(
                    staging / "version",
                    self._front_dir,
                    number,
                    lambda name: layout.settle(staging / "version", front, name),
                )
        removed = self._remove_old(number, keep)
        return PublishRowsReport(
            path=path,
            version=number,
            model=self._model,
            url=self._store.url,
            rows_written=self._rows,
            bytes_written=self._bytes,
            bytes_reused=total - self._bytes,
            removed=removed,
            newest=version_folders(self._front_dir)[-1][0],
        )

    def _fronts(self) -> dict[str, Path]:
        """Return the versions of FRONT_DIR whose rows are this model's, by their number."""
        found = {}
        for number, path in version_folders(self._front_dir):
            manifest = Manifest.read(path)
            if manifest is not None and manifest.row_store is not None and manifest.row_store.name == self._model:
                found[str(number)] = path
        return found

    def _check_front(self, number: int, front: Manifest) -> None:
        """Raise ExportError if FRONT_DIR has another version of the number."""
        path = self._front_dir / str(number)
        there = Manifest.read(path) if path.is_dir() else front
        if there is not None and there.row_store is not None and there.row_store.name != self._model:
            raise ExportError(
                f"FRONT_DIR {self._front_dir}: its version {number} is of model {there.row_store.name}, not {self._model}. Publish "
                "under that name, or to another FRONT_DIR."
            )
        if there != front:
            raise ExportError(f"FRONT_DIR {self._front_dir}: has another version {number}. Export again.")

    def _check_redis(self, number: int, front: Manifest) -> None:
        """Raise ExportError if the versions in Redis are those of another FRONT_DIR: this one would remove their rows."""
        versions, assumed = self._records("version:"), "If that folder is gone, publish with rewrite=True"
        assert front.row_store is not None
        record, arrays = versions.pop(str(number), None), sorted(set(front.row_store.arrays.values()))
        if versions and not versions.keys() & self._fronts().keys():
            raise ExportError(
                f"Redis at {self._store.url}: model {self._model} has version {', '.join(sorted(versions, key=int))}, "
                f"and FRONT_DIR {self._front_dir} has none of them, so they are another FRONT_DIR's. Publish under another name. "
                f"{assumed}."
            )
        if record is not None and record["arrays"] != arrays and not (self._front_dir / str(number)).is_dir():
            raise ExportError(
                f"Redis at {self._store.url}: version {number} of model {self._model} is another export. Publish under another "
                f"name. {assumed}."
            )

    def _write(
        self,
        folder: Path,
        array: ArrayEntry,
        digest: "_Digest",
        row_bytes: int,
        rewrite: bool,
        on_chunk: Callable[[], None],
    ) -> None:
        """Write the rows of an array that Redis does not have. Each chunk is recorded after it is written."""
        field, step = f"array:{digest.id}", _chunk_rows(row_bytes)
        recorded = self._records("array:").get(digest.id)
        start = 0 if rewrite or recorded is None else recorded["written"]
        if start < array.rows:
            start -= start % step
        record = recorded or {"rows": array.rows, "written": 0}
        self._done += start * row_bytes
        for first, stop, rows in _chunks(folder, array, row_bytes, start):
            if google_crc32c.value(rows.reshape(-1)) != digest.chunks[first // step]:
                raise ExportError(f"export {folder}: {array.file} changed while it was published. Publish again.")
            self._note(field, record)  # a row that no record tells of is never removed
            self._store.write(RowKeys.of(self._model, [(digest.id, np.arange(first, stop))]), rows)
            if not rewrite or recorded is None:  # else it is recorded already, and stays so if this is interrupted
                record = {"rows": array.rows, "written": stop}
            self._rows += stop - first
            self._bytes += rows.size
            self._done += rows.size
            on_chunk()
        self._note(field, {"rows": array.rows, "written": array.rows})

    def _remove_old(self, number: int, keep: int) -> tuple[int, ...]:
        """Remove all versions but the `keep` that were published last, and then the rows that none of these has.

        A version whose rows are not in Redis, because it has lost its content, goes too.
        """
        versions = self._records("version:")
        by_age = sorted((one for one in versions if one != str(number)), key=lambda one: versions[one]["published"])
        removed = {*by_age[: max(0, len(by_age) + 1 - keep)], *(self._fronts().keys() - versions.keys())}
        for one in removed:  # before their rows, so that no server starts to serve them
            with locked(self._front_dir):
                shutil.rmtree(self._front_dir / one, ignore_errors=True)
            self._note(f"version:{one}", None)
        needed = {id_ for one in versions if one not in removed for id_ in versions[one]["arrays"]}
        for id_, record in self._records("array:").items():
            if id_ in needed:
                continue
            # A removal that is interrupted leaves no array that seems whole, and none is removed that another publish writes.
            for first in range(0, record["rows"], _CHUNK_ROWS):
                rows = np.arange(first, min(first + _CHUNK_ROWS, record["rows"]))
                self._note(f"array:{id_}", {**record, "written": 0})
                self._store.remove(RowKeys.of(self._model, [(id_, rows)]))
            self._note(f"array:{id_}", None)
        return tuple(sorted(map(int, removed)))

    def _records(self, prefix: str) -> dict[str, Any]:
        return self._store.records(self._model, prefix)

    def _note(self, field: str, record: Mapping[str, Any] | None) -> None:
        """Set or remove a field of the model's hash, unless another publish has begun, or Redis has lost its content."""
        if not self._store.note(self._model, self._token, field, None if record is None else json.dumps(record)):
            raise ExportError(
                f"Redis at {self._store.url}: the lease of model {self._model} was lost: Redis has lost its content, or another "
                f"process publishes since this one was stopped for more than {_LEASE_SECONDS:.0f} seconds. Publish again."
            )


class _Digest(NamedTuple):
    """The content of an array.

    Attributes:
        id: the text that names the array in keys: a digest of its bytes and of the length of a row.
        chunks: the CRC32C of each chunk.
    """

    id: str
    chunks: list[int]


def _digest(folder: Path, array: ArrayEntry, row_bytes: int) -> _Digest:
    """Read an array.

    Raises:
        ExportError: the bytes are not those of the manifest. Nothing damaged is ever written.
    """
    content, checksum, chunks = hashlib.sha256(b"%d:" % row_bytes), 0, []
    for _, _, rows in _chunks(folder, array, row_bytes, 0):
        content.update(rows.data)
        checksum = google_crc32c.extend(checksum, rows.reshape(-1))
        chunks.append(google_crc32c.value(rows.reshape(-1)))
    if checksum != array.crc32c:
        raise ExportError(
            f"export {folder}: the rows in {array.file} have the CRC32C {checksum:#010x}, but the manifest has "
            f"{array.crc32c:#010x}. Copy the version again, or export it again."
        )
    return _Digest(content.hexdigest()[:16], chunks)


def _chunk_rows(row_bytes: int) -> int:
    return max(1, min(_CHUNK_BYTES // row_bytes, _CHUNK_ROWS))


def _chunks(folder: Path, array: ArrayEntry, row_bytes: int, start: int) -> Iterator[tuple[int, int, Any]]:
    """Yield (first row, row after the last, uint8 [n, row_bytes]) of the rows of an array from `start` on."""
    step = _chunk_rows(row_bytes)
    try:
        with contextlib.closing(open_bytes(folder / array.file)) as file:
            for first in range(start, array.rows, step):
                rows = np.empty((min(step, array.rows - first), row_bytes), np.uint8)
                file.read_into(array.offset + first * row_bytes, rows.reshape(-1).data)
                yield first, first + len(rows), rows
    except (OSError, EOFError) as error:
        raise ExportError(f"export {folder}: {array.file} cannot be read: {reason(error)}. Publish again.") from None
