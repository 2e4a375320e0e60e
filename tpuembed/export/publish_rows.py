"""Publishes a version to Redis: its rows, and then a version without tables, the front, that servers load.

An array is named by its content. So an overlay writes its changed rows alone, because its base's rows are there, and a publish
that was interrupted resumes after the last chunk that was written.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

import google_crc32c
import numpy as np

from tpuembed.checkpoint.bundle.object_graph import OBJECT_GRAPH_KEY, ObjectGraph
from tpuembed.errors import ConfigError, ExportError, reason
from tpuembed.export.publish.folder import locked, publish_folder, temporary_staging
from tpuembed.export.publish.layouts import BUNDLE
from tpuembed.export.publish.version_writer import naming_model_dir
from tpuembed.export.retention.listing import find_version, local_model_dir, version_folders
from tpuembed.files import FilePath, as_path, open_bytes
from tpuembed.manifest import (
    NAMES_FOLDER,
    ArrayEntry,
    FileEntry,
    Manifest,
    NamesEntry,
    RowStoreEntry,
)
from tpuembed.row_store import RowKeys, RowStore, check_model, connect
from tpuembed.saved_model import GRAPH_FILE, check_sizes, file_crc32c, mapped_from, replace_file, without_rows
from tpuembed.tensor_bundle import Bundle, index_path, read_index, write_index

__all__ = ["PublishRowsReport", "publish_rows"]

_CHUNK_BYTES: Final = 4 << 20
_CHUNK_ROWS: Final = 1 << 16
_LEASE_SECONDS: Final = 60.0
"""A publish that died keeps others away for so long. It is renewed after each chunk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishRowsReport:
    """The result of `publish_rows`.

    Attributes:
        path: of the front.
        version: its number.
        model: the name in Redis.
        url: of Redis, without a password.
        rows_written, bytes_written: the rows that were written now.
        bytes_reused: bytes of rows that Redis had already.
        removed: older versions that were removed.
    """

    path: Path
    version: int
    model: str
    url: str
    rows_written: int
    bytes_written: int
    bytes_reused: int
    removed: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**dataclasses.asdict(self), "path": str(self.path)}


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
    folder, manifest = _find(local_model_dir(model_dir, "publish"), version)
    front = front.absolute()
    if front.resolve() == folder.parent.resolve():
        raise ConfigError(f"FRONT_DIR {front}: is MODEL_DIR too. Name a folder of its own.")
    model = check_model(name or front.name)
    stored = _stored_arrays(folder, manifest)
    check_sizes(folder, manifest)
    store = connect(url)
    with contextlib.closing(store), naming_model_dir(front), contextlib.ExitStack() as held:
        descriptor = os.open(folder, os.O_RDONLY)
        held.callback(os.close, descriptor)
        with contextlib.suppress(OSError):  # the lock keeps prune from removing the version; NFS has none
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        front.mkdir(parents=True, exist_ok=True)
        published = _Published(store, model, front, held.enter_context(_lease(store, model)))
        return published.run(folder, manifest, stored, keep, rewrite, on_progress)


def _find(model_dir: Path, version: int | None) -> tuple[Path, Manifest]:
    folder = find_version(model_dir, version).absolute()
    manifest = Manifest.read(folder)
    if manifest is None:
        raise ConfigError(f"version {folder}: tpuembed did not export it. Choose another version.")
    return folder, manifest


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
def _lease(store: RowStore, model: str) -> Iterator[Callable[[], None]]:
    """Lease the model for one publish at a time. Yields a function that renews the lease."""
    from redis.exceptions import LockError

    lock = store.client.lock(f"tpuembed:{model}:lease", timeout=_LEASE_SECONDS, thread_local=False)
    with store.refusals():
        is_held = lock.acquire(blocking=False)
    if not is_held:
        raise ExportError(
            f"Redis at {store.url}: another process publishes model {model}. Wait until it has ended. If it died, wait "
            f"{_LEASE_SECONDS:.0f} seconds."
        )

    def renew() -> None:
        try:
            with store.refusals():
                lock.reacquire()
        except LockError:
            raise ExportError(
                f"Redis at {store.url}: the lease of model {model} was lost: a chunk took longer than "
                f"{_LEASE_SECONDS:.0f} seconds. Publish again."
            ) from None

    try:
        yield renew
    finally:
        with contextlib.suppress(Exception):  # it ends by itself
            lock.release()


class _Published:
    """A model in Redis and in its FRONT_DIR, while one process publishes.

    Redis has one hash, `tpuembed:MODEL`. Its field `array:ID` has how many rows of an array there are, and how many of them are
    written; `version:N` has when version N was published, and its arrays.
    """

    def __init__(self, store: RowStore, model: str, front_dir: Path, renew: Callable[[], None]) -> None:
        self._store, self._model, self._front_dir, self._renew = store, model, front_dir, renew
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
        ids = {array.name: _digest(folder, array, row_bytes) for array, row_bytes in stored}
        with temporary_staging(self._front_dir, "publish", str(number)) as staging:
            front = _write_front(folder, manifest, RowStoreEntry(name=self._model, arrays=ids), staging / "version")
            self._check_number(number, front)
            for array, row_bytes in stored:
                self._write(folder, array, ids[array.name], row_bytes, rewrite, lambda: on_progress(self._done, total))
            self._put(f"version:{number}", {"published": time.time(), "arrays": sorted(set(ids.values()))})
            path = self._front_dir / str(number)
            if not path.is_dir():
                path = publish_folder(
                    staging / "version",
                    self._front_dir,
                    number,
                    lambda name: _settle(staging / "version", front, self._front_dir / name),
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
        )

    def _check_number(self, number: int, front: Manifest) -> None:
        """Raise ExportError if the number is that of another export, in FRONT_DIR or in Redis: both would share its rows."""
        path = self._front_dir / str(number)
        if path.is_dir():
            if Manifest.read(path) != front:
                raise ExportError(f"FRONT_DIR {self._front_dir}: has another version {number}. Export again.")
            return
        record = self._records("version:").get(str(number))
        assert front.row_store is not None
        if record is not None and record["arrays"] != sorted(set(front.row_store.arrays.values())):
            raise ExportError(
                f"Redis at {self._store.url}: version {number} of model {self._model} is another export. Publish under another "
                "name."
            )

    def _write(
        self, folder: Path, array: ArrayEntry, id_: str, row_bytes: int, rewrite: bool, on_chunk: Callable[[], None]
    ) -> None:
        """Write the rows of an array that Redis does not have. Each chunk is recorded after it is written."""
        start = 0 if rewrite else self._records("array:").get(id_, {"written": 0})["written"]
        self._done += start * row_bytes
        for first, stop, rows in _chunks(folder, array, row_bytes, start):
            self._store.write(RowKeys.of(self._model, [(id_, np.arange(first, stop))]), rows)
            if not rewrite:  # else it is recorded already, and stays so if this is interrupted
                self._put(f"array:{id_}", {"rows": array.rows, "written": stop})
            self._rows, self._bytes, self._done = (
                self._rows + stop - first,
                self._bytes + rows.size,
                self._done + rows.size,
            )
            self._renew()
            on_chunk()
        self._put(f"array:{id_}", {"rows": array.rows, "written": array.rows})

    def _remove_old(self, number: int, keep: int) -> tuple[int, ...]:
        """Remove all versions but the `keep` that were published last, and then the rows that none of these has."""
        versions = self._records("version:")
        by_age = sorted((one for one in versions if one != str(number)), key=lambda one: versions[one]["published"])
        removed = by_age[: max(0, len(by_age) + 1 - keep)]
        for one in removed:  # before their rows, so that no server starts to serve them
            with locked(self._front_dir):
                shutil.rmtree(self._front_dir / one, ignore_errors=True)
            self._drop(f"version:{one}")
        needed = {id_ for one in versions if one not in removed for id_ in versions[one]["arrays"]}
        for _, path in version_folders(
            self._front_dir
        ):  # a version that was rolled back has a number that Redis does not know
            manifest = Manifest.read(path)
            needed |= set(manifest.row_store.arrays.values()) if manifest is not None and manifest.row_store else set()
        for id_, record in self._records("array:").items():
            if id_ in needed:
                continue
            self._put(
                f"array:{id_}", {**record, "written": 0}
            )  # a removal that is interrupted leaves no array that seems whole
            for first in range(0, record["rows"], _CHUNK_ROWS):
                rows = np.arange(first, min(first + _CHUNK_ROWS, record["rows"]))
                self._store.remove(RowKeys.of(self._model, [(id_, rows)]))
                self._renew()
            self._drop(f"array:{id_}")
        return tuple(sorted(map(int, removed)))

    def _records(self, prefix: str) -> dict[str, Any]:
        """Return the records whose field begins with `prefix`, by the rest of their field."""
        with self._store.refusals():
            fields: Mapping[bytes, bytes] = self._store.client.hgetall(f"tpuembed:{self._model}")
        found = {key.decode(): json.loads(value) for key, value in fields.items()}
        return {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}

    def _put(self, field: str, record: Mapping[str, Any]) -> None:
        with self._store.refusals():
            self._store.client.hset(f"tpuembed:{self._model}", field, json.dumps(record))

    def _drop(self, field: str) -> None:
        with self._store.refusals():
            self._store.client.hdel(f"tpuembed:{self._model}", field)


def _digest(folder: Path, array: ArrayEntry, row_bytes: int) -> str:
    """Return the text that names an array in keys: a digest of its bytes and of the length of a row.

    Raises:
        ExportError: the bytes are not those of the manifest. Nothing damaged is ever written.
    """
    content, checksum = hashlib.sha256(b"%d:" % row_bytes), 0
    for _, _, rows in _chunks(folder, array, row_bytes, 0):
        content.update(rows.data)
        checksum = google_crc32c.extend(checksum, rows.reshape(-1))
    if checksum != array.crc32c:
        raise ExportError(
            f"export {folder}: the rows in {array.file} have the CRC32C {checksum:#010x}, but the manifest has "
            f"{array.crc32c:#010x}. Copy the version again, or export it again."
        )
    return content.hexdigest()[:16]


def _chunks(folder: Path, array: ArrayEntry, row_bytes: int, start: int) -> Iterator[tuple[int, int, Any]]:
    """Yield (first row, row after the last, uint8 [n, row_bytes]) of the rows of an array from `start` on."""
    step = max(1, min(_CHUNK_BYTES // row_bytes, _CHUNK_ROWS))
    try:
        with contextlib.closing(open_bytes(folder / array.file)) as file:
            for first in range(start, array.rows, step):
                rows = np.empty((min(step, array.rows - first), row_bytes), np.uint8)
                file.read_into(array.offset + first * row_bytes, rows.reshape(-1).data)
                yield first, first + len(rows), rows
    except (OSError, EOFError) as error:
        raise ExportError(f"export {folder}: {array.file} cannot be read: {reason(error)}. Publish again.") from None


# ---- the front


def _write_front(folder: Path, manifest: Manifest, entry: RowStoreEntry, target: Path) -> Manifest:
    """Write the version in `folder` without the arrays of `entry` into the new folder `target`. Return its manifest.

    The graph's tables have no rows, so that it loads, and no id can be looked up by it.
    """
    left = [array for stack in manifest.stacks for array in stack.arrays if array.name in entry.arrays]
    files = {array.file for array in left}
    made = {GRAPH_FILE.as_posix(), index_path(BUNDLE).as_posix()}
    kept = {file for file in (*manifest.files, *manifest.table_files()) if not file.startswith("assets.extra/")}
    for file in sorted(kept - files - made):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link((folder / file).resolve(), target / file)
        except OSError:  # another file system, or one without hard links
            shutil.copy2(folder / file, target / file)
    names = tuple(_names_in_files(folder, manifest, number, target) for number in range(len(manifest.names)))
    front = dataclasses.replace(
        manifest,
        row_store=entry,
        base=None,
        stacks=tuple(dataclasses.replace(stack, base_file="") for stack in manifest.stacks),
        names=names,
    )
    graph = (folder / GRAPH_FILE).read_bytes()
    if manifest.layout == "mmap":
        graph = mapped_from(without_rows(graph, left), front, PurePosixPath())
    (target / GRAPH_FILE).write_bytes(graph)
    _write_index(folder, {array.key for array in left}, target)
    entries = {file: manifest.files[file] for file in kept - made if file in manifest.files}
    for file in made:
        entries[file] = FileEntry(size=(target / file).stat().st_size, crc32c=file_crc32c(target / file))
    front = dataclasses.replace(front, files=dict(sorted(entries.items())))
    front.write(target)
    return front


def _write_index(folder: Path, keys: Collection[str], target: Path) -> None:
    """Write the bundle's index. The tensors of `keys` have no rows, in the first data file, which is never a table's."""
    index = read_index(index_path(folder / BUNDLE))
    entries = {
        key: dataclasses.replace(one, shape=(0, *one.shape[1:]), shard=0, offset=0, size=0, crc32c=0)
        if key in keys
        else one
        for key, one in index.entries.items()
    }
    write_index(index_path(target / BUNDLE), entries, index.num_shards)


def _names_in_files(folder: Path, manifest: Manifest, number: int, target: Path) -> NamesEntry:
    """Return the entry of a table's names, whose arrays are files. With layout variables, they are written to `target`."""
    entry = manifest.names[number]
    if entry.arrays:
        return entry
    arrays = []
    with Bundle.open(folder / BUNDLE) as bundle:
        nodes = ObjectGraph.parse(bundle.read_string(OBJECT_GRAPH_KEY)).nodes
        keys = {node.full_name: node.value_key for node in nodes if node.value_key is not None}
        for what in ("keys", "numbers"):
            name, file = f"names_{number}_{what}", f"{NAMES_FOLDER}/{number}.{what}"
            value = np.ascontiguousarray(bundle.read(keys[name]))
            (target / file).parent.mkdir(exist_ok=True)
            (target / file).write_bytes(value.tobytes())
            checksum = file_crc32c(target / file)
            arrays.append(ArrayEntry(name=name, key="", rows=len(value), file=file, size=value.nbytes, crc32c=checksum))
    return dataclasses.replace(entry, arrays=tuple(arrays))


def _settle(version: Path, front: Manifest, target: Path) -> None:
    """Let the graph map its other files, such as names, from where it is served."""
    if front.layout == "mmap":
        replace_file(version / GRAPH_FILE, mapped_from((version / GRAPH_FILE).read_bytes(), front, target))
