"""Looks up in rows that are in Redis, for versions that `tpuembed publish` wrote.

A batch's rows are fetched at once, each of them one time. The C library then pools them, and whole models go on with their
signature `from_activations`. So the answers are those of the export with layout mmap and `--lookups native`, to the last bit.
"""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError, MissingExtraError, RowStoreDataError, RowStoreError
from tpuembed.errors.ids import Span, outside_message
from tpuembed.manifest import ActivationEntry, FeatureEntry, Manifest, RowStoreEntry, StackEntry, TableEntry
from tpuembed.native.lookup import NativeLookups, available, mapped_array
from tpuembed.row_store import RowKeys, RowStore, connect
from tpuembed_serving.core.batch_deadline import remaining_seconds
from tpuembed_serving.core.servable import Array, Signature
from tpuembed_serving.core.status import Code, StatusError, invalid_argument, timed_out
from tpuembed_serving.tensorflow.activations import NativeActivations
from tpuembed_serving.tensorflow.native import Call, NativeCalls, Other

__all__ = ["RowStoreOptions", "stored_calls"]

logger = logging.getLogger(__name__)

_Rows = npt.NDArray[np.int64]

_PADDING: Final = -1
_MOST_INT64: Final = np.iinfo(np.int64).max
_KEY_BYTES: Final = 256
"""About the memory of a key and of Python's objects for it and its row."""
_LOG_SECONDS: Final = 60.0
_PROBE_SECONDS: Final = 0.5
_BITS_SET: Final = np.array([number.bit_count() for number in range(256)], np.int64)


class RowStoreOptions(NamedTuple):
    """Options of a server whose rows are in Redis.

    Attributes:
        url: of Redis.
        timeout_seconds: how long a node may take for an answer.
        max_bytes: about how much memory the rows of one batch may take.
    """

    url: str
    timeout_seconds: float
    max_bytes: int


def stored_calls(
    version_dir: Path, manifest: Manifest, options: RowStoreOptions | None, threads: int | None
) -> NativeCalls:
    """Return the calls of the version at `version_dir`, whose rows are in Redis.

    Args:
        version_dir: the version's folder.
        manifest: of the version.
        options: None if the server has none.
        threads: how many threads one call may use; None is one for each processor.

    Raises:
        StatusError: FAILED_PRECONDITION, the server cannot look up in Redis; UNAVAILABLE, Redis cannot be reached or does not
            have all rows.
    """
    where = f"version {version_dir.name}: its rows are in Redis"
    if options is None:
        raise StatusError(
            Code.FAILED_PRECONDITION,
            f"{where}. Start the server with --row-store redis://HOST:PORT, where it was published",
        )
    if fault := available():
        raise StatusError(Code.FAILED_PRECONDITION, f"{where}, and native lookups pool them: {fault}")
    try:
        _check_rows(manifest, options)
    except RowStoreError as error:
        raise _status(Code.UNAVAILABLE, f"version {version_dir.name}: {error}") from None
    return _StoredCalls(manifest, version_dir, options, threads)


def _check_rows(manifest: Manifest, options: RowStoreOptions) -> None:
    """Raise RowStoreError unless Redis says that it has all rows of the version."""
    entry, store = manifest.row_store, _connection_to(options).store
    assert entry is not None
    rows = {array.name: array.rows for stack in manifest.stacks for array in stack.arrays}
    found = store.records(entry.name, "array:")
    written = {name: found.get(id_, {"written": 0})["written"] for name, id_ in entry.arrays.items()}
    missing = sum(rows[name] - written[name] for name in entry.arrays)
    if missing:
        total = sum(rows[name] for name in entry.arrays)
        raise RowStoreError(
            f"Redis at {store.url}: {missing} of the {total} rows of model {entry.name} are not there. Publish the version again, "
            "or name the Redis and its database (redis://HOST:PORT/DB) that it was published to."
        )


class _StoredCalls(NativeCalls):
    """The calls of one version."""

    def __init__(self, manifest: Manifest, version_dir: Path, options: RowStoreOptions, threads: int | None) -> None:
        self._rows, self._faults = _StoredRows(manifest, version_dir, options), _Faults(version_dir)
        self._features = NativeLookups(manifest, version_dir, threads=threads) if manifest.features else None
        self._model = None if manifest.features else _StoredActivations(manifest, version_dir, threads=threads)

    def answers_almost_all(self, signature: Signature) -> bool:
        """Return True for all but `from_activations`."""
        return signature.name != "from_activations"

    def call(self, signature: Signature, tensorflow: Call, other: Other) -> Call:
        """Return the call of `signature`. See NativeCalls."""
        name, aliases = signature.name, [info.alias for info in signature.inputs]
        run: Callable[[dict[str, Array]], Mapping[str, Array]]
        if name == "from_activations":
            return tensorflow
        if self._features is not None and name == "serving_default":
            run = functools.partial(self._looked_up, self._features)
        elif self._model is not None and name == "serving_default":
            run = functools.partial(self._answered, self._model, *other("from_activations"))
        else:
            return functools.partial(_refuse, name)

        def call(*inputs: Array) -> list[Array]:
            try:
                found = run(dict(zip(aliases, inputs, strict=True)))
            except RowStoreDataError as error:
                self._faults.note(error)
                raise _status(Code.DATA_LOSS, error) from None
            except RowStoreError as error:
                self._faults.note(error)
                raise _status(Code.UNAVAILABLE, error) from None
            except MissingExtraError as error:
                raise _status(Code.FAILED_PRECONDITION, error) from None
            except ConfigError as error:
                raise invalid_argument(str(error).rstrip(".")) from None
            self._faults.end()
            return [found[info.alias] for info in signature.outputs]

        return call

    def _looked_up(self, lookups: NativeLookups, inputs: Mapping[str, Array]) -> dict[str, Array]:
        (found,) = self._rows.pooled([(lookups, lookups.rows_of(inputs), inputs)])
        return found

    def _answered(
        self, activations: "_StoredActivations", rest: Signature, run_rest: Call, inputs: dict[str, Array]
    ) -> dict[str, Array]:
        parts = activations.parts_of(inputs)
        for found in self._rows.pooled(parts):
            inputs |= activations.shaped(found, inputs)
        outputs = run_rest(*[inputs[info.alias] for info in rest.inputs])
        return dict(zip([info.alias for info in rest.outputs], outputs, strict=True))


class _Faults:
    """Logs that requests fail, at most once a minute, and that Redis answers again after it has been away."""

    def __init__(self, version_dir: Path) -> None:
        self._version = f"{version_dir.parent.name} version {version_dir.name}"
        self._logged_at, self._is_away = -_LOG_SECONDS, False

    def note(self, error: RowStoreError) -> None:
        now = time.monotonic()
        if now - self._logged_at >= _LOG_SECONDS:
            self._logged_at, self._is_away = now, not isinstance(error, RowStoreDataError)
            logger.error("model %s: requests fail: %s", self._version, error)

    def end(self) -> None:
        if self._is_away:
            self._is_away = False
            logger.warning("model %s: Redis answers again", self._version)


class _StoredActivations(NativeActivations):
    """The lookups of a whole model. They have the rules of the layer's graph for ids and weights."""

    def parts_of(self, inputs: Mapping[str, Array]) -> "list[_Part]":
        """Return lookups with the ids and weights that each takes.

        Raises:
            StatusError: INVALID_ARGUMENT, an input does not fit.
            ConfigError: a name is unknown.
        """
        parts: list[_Part] = []
        for features, lookups in self._parts:
            given: dict[str, Array] = {}
            for one in features:
                given[one.name] = _ids_of(one, inputs[one.ids])
                if one.weighted:
                    is_padding = inputs[one.ids] == (b"" if one.names == "string" else _PADDING)
                    given[f"{one.name}_weights"] = _weights_of(one, is_padding, inputs[one.weights])
            parts.append((lookups, lookups.rows_of(given), given))
        return parts

    def shaped(self, found: Mapping[str, Array], inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return activations in the shape of their ids."""
        ids = {one.name: one.ids for part, _ in self._parts for one in part if one.input == "id"}
        return {
            name: rows.reshape(*inputs[ids[name]].shape, rows.shape[-1]) if name in ids else rows
            for name, rows in found.items()
        }


_Part = tuple[NativeLookups, Sequence[Array], Mapping[str, Array]]
"""Lookups, the ids of their features, and their weights by name."""


def _ids_of(feature: ActivationEntry, ids: Array) -> Array:
    if feature.names != "string":
        if ids.dtype == np.uint64:  # larger ones would become negative
            ids = np.minimum(ids, np.uint64(_MOST_INT64))
        ids = ids.astype(np.int64, copy=False)
        if feature.input == "ids" and feature.out_of_vocabulary == "error" and not feature.names:
            ids = np.maximum(ids, _PADDING)  # the layer drops all negative ids
    return ids.reshape(-1) if feature.input == "id" else ids


def _weights_of(feature: ActivationEntry, is_padding: Array, weights: Array) -> Array:
    """Return the weights of a list. The weight of padding does not count.

    Raises:
        StatusError: INVALID_ARGUMENT, there is not one weight for each id.
    """
    ends = np.logical_and.accumulate(is_padding[:, ::-1], axis=1)[:, ::-1] if is_padding.size else is_padding
    if weights.shape == is_padding.shape:
        missing = np.count_nonzero(np.isnan(weights) & ~is_padding)
        extra = np.count_nonzero(~np.isnan(weights) & (weights != 0) & ends)
        if not (missing or extra):
            return weights.astype(np.float32, copy=False)
        fault = f" in every row; missing are {missing} and too many {extra}"
    else:
        fault = f"; their shapes are {list(weights.shape)} and {list(is_padding.shape)}"
    raise invalid_argument(f"input {feature.weights} must have as many values as {feature.ids}{fault}")


class _StoredRows:
    """The rows of one version in Redis. Several threads may use it."""

    def __init__(self, manifest: Manifest, version_dir: Path, options: RowStoreOptions) -> None:
        assert manifest.row_store is not None
        self._entry, self._options = manifest.row_store, options
        stacks = {stack.name: stack for stack in manifest.stacks}
        self._tables = {
            table.name: _StoredTable(table, stacks[table.stack], manifest.row_store, version_dir)
            for table in manifest.tables
            if table.stack in manifest.row_store.arrays
        }

    def pooled(self, parts: Sequence[_Part]) -> list[dict[str, Array]]:
        """Return the activations of each part. All rows are fetched at once.

        Raises:
            ConfigError: an id is outside its table.
            RowStoreDataError: a row is missing, or has another length.
            RowStoreError: Redis cannot be reached, or has not answered in time.
            StatusError: RESOURCE_EXHAUSTED or DEADLINE_EXCEEDED.
        """
        chosen = [
            [self._chosen(feature, ids) for feature, ids in zip(lookups.features, arrays, strict=True)]
            for lookups, arrays, _ in parts
        ]
        by_table: dict[str, list[_Rows]] = {}
        for one in (one for part in chosen for one in part if one is not None):
            by_table.setdefault(one.table, []).append(one.rows[one.is_read])
        wanted = {table: np.unique(np.concatenate(rows)) for table, rows in by_table.items()}
        stored = self._fetched(wanted)
        found = []
        for (lookups, arrays, given), part in zip(parts, chosen, strict=True):
            places = [
                ids if one is None else one.places(wanted[one.table]) for ids, one in zip(arrays, part, strict=True)
            ]
            found.append(lookups.in_place_of(stored).pooled(places, given))
        return found

    def _chosen(self, feature: FeatureEntry, ids: Array) -> "_Chosen | None":
        """Return the rows that a feature needs. None if its table is in the version."""
        if feature.table not in self._tables:
            return None
        return _Chosen.of(feature, self._tables[feature.table].entry, ids)

    def _fetched(self, wanted: Mapping[str, _Rows]) -> dict[str, Array]:
        """Return uint8 [n, row_bytes] by table: the stored rows of `wanted`."""
        tables = [self._tables[name] for name in wanted]
        size = sum(
            len(rows) * (table.stack.row_bytes + _KEY_BYTES)
            for table, rows in zip(tables, wanted.values(), strict=True)
        )
        if size > self._options.max_bytes:
            text = f"the rows of the request need about {size / 2**20:.1f} MiB of memory. The limit is"
            limit = f"{self._options.max_bytes / 2**20:.1f} MiB (--max-request-memory)"
            raise StatusError(Code.RESOURCE_EXHAUSTED, f"{text} {limit}. Send fewer rows per request")
        places = [table.places(rows) for table, rows in zip(tables, wanted.values(), strict=True)]
        arrays = [one for parts, _ in places for one in parts]
        seconds = remaining_seconds()
        if seconds is not None and seconds <= 0:
            raise timed_out()
        values = (
            _connection_to(self._options).read(RowKeys.of(self._entry.name, arrays))
            if any(len(rows) for _, rows in arrays)
            else []
        )
        found, start = {}, 0
        for (name, rows), table, (_, order) in zip(wanted.items(), tables, places, strict=True):
            own, start = values[start : start + len(rows)], start + len(rows)
            stored = np.empty((len(rows), table.stack.row_bytes), np.uint8)
            stored[order] = self._joined(table, own, rows[order])
            found[name] = stored
        return found

    def _joined(self, table: "_StoredTable", values: Sequence[bytes | None], rows: _Rows) -> Array:
        row_bytes = table.stack.row_bytes
        if not set(map(type, values)) - {bytes} and not set(map(len, values)) - {row_bytes}:  # type: ignore[arg-type]
            return np.frombuffer(b"".join(values), np.uint8).reshape(len(values), row_bytes)  # type: ignore[arg-type]
        place = next(n for n, one in enumerate(values) if one is None or len(one) != row_bytes)
        value = values[place]
        fault = "is missing" if value is None else f"has {len(value)} bytes, and a row has {row_bytes}"
        raise RowStoreDataError(
            f"Redis at {_connection_to(self._options).store.url}: model {self._entry.name}: row {rows[place]} of "
            f"table {table.entry.name} {fault}. Publish the version with --rewrite, and set maxmemory-policy noeviction."
        )


class _Chosen(NamedTuple):
    """The rows of one feature.

    Attributes:
        table: its name.
        rows: the row in the table of each id.
        is_read: whether an id has a row.
        is_padding: whether an id is padding. The others without a row are rows of zeros.
    """

    table: str
    rows: _Rows
    is_read: Array
    is_padding: Array

    @classmethod
    def of(cls, feature: FeatureEntry, table: TableEntry, ids: Array) -> "_Chosen":
        """Return the rows of `ids`.

        Raises:
            ConfigError: an id is outside the table, with the message of the export's graph.
        """
        if feature.max_sequence_length and feature.input == "ids":
            ids = ids[:, : feature.max_sequence_length]
        rows, policy = ids, feature.out_of_vocabulary
        is_padding = (ids == _PADDING) if feature.input == "ids" else np.zeros(ids.shape, bool)
        is_outside = ((rows < 0) | (rows >= table.rows)) & ~is_padding
        if policy == "error" and is_outside.any():
            place = tuple(np.argwhere(is_outside)[0].tolist())
            span = Span(table.name, table.rows)
            raise ConfigError(outside_message(feature.name, span, int(ids[place]), place[0]))
        if not isinstance(policy, str):
            rows = np.where(is_outside, policy, rows)
            is_outside = np.zeros_like(is_outside)
        return cls(table.name, rows, ~(is_padding | is_outside), is_padding)

    def places(self, rows: _Rows) -> _Rows:
        """Return ids that are places in the sorted `rows`. Ids without a row are padding, or behind the end."""
        places = np.where(self.is_padding, _PADDING, len(rows))
        places[self.is_read] = np.searchsorted(rows, self.rows[self.is_read])
        return places


class _StoredTable:
    """The arrays that have the rows of one table."""

    def __init__(self, entry: TableEntry, stack: StackEntry, store: RowStoreEntry, version_dir: Path) -> None:
        self.entry, self.stack = entry, stack
        self._own, self._words = store.arrays[stack.name], None
        if stack.overlay is not None:
            self._overlay = store.arrays[stack.overlay.rows.name]
            self._words = mapped_array(version_dir, stack.overlay.words).view("<i4").reshape(-1, 2)

    def places(self, rows: _Rows) -> tuple[list[tuple[str, _Rows]], _Rows]:
        """Return the rows of arrays that `rows` of the table are, and int64 [n]: the place in `rows` of each of these."""
        stacked = rows + self.entry.row_offset
        if self._words is None:
            return [(self._own, stacked)], np.arange(len(rows))
        bits, ranks = self._words[stacked // 32].T
        word, bit = np.ascontiguousarray(bits).view(np.uint32), np.uint32(1) << (stacked % 32).astype(np.uint32)
        is_new = (word & bit) != 0
        before = _BITS_SET[(word & (bit - np.uint32(1))).view(np.uint8).reshape(-1, 4)].sum(axis=1)
        new, old = np.flatnonzero(is_new), np.flatnonzero(~is_new)
        places = [
            (self._own, stacked[old]),
            (self._overlay, ranks[new].astype(np.int64) + 1 + before[new]),
        ]
        return places, np.concatenate([old, new])


class _Connection:
    """The connection of this process to one Redis.

    A read holds a thread that runs requests of all models. So once Redis does not answer, requests fail at once, and a thread of
    its own asks until it answers again.
    """

    def __init__(self, store: RowStore) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._fault: RowStoreError | None = None

    def read(self, keys: RowKeys) -> list[bytes | None]:
        """Return the value of each key. Raises RowStoreError as RowStore.read."""
        if (fault := self._fault) is not None:
            raise RowStoreError(str(fault))
        try:
            return self.store.read(keys)
        except RowStoreError as error:
            with self._lock:
                if self._fault is None:
                    self._fault = error
                    threading.Thread(target=self._wait, name="redis-probe", daemon=True).start()
            raise

    def _wait(self) -> None:
        while True:
            time.sleep(_PROBE_SECONDS)
            # Whatever the client raises: if this thread ended, all requests would fail until the server is started again.
            with contextlib.suppress(Exception):
                self.store.ping()
                self._fault = None
                return


_connecting = threading.Lock()


def _connection_to(options: RowStoreOptions) -> _Connection:
    """Return the connection of this process."""
    with _connecting:
        return _connected(options.url, options.timeout_seconds)


@functools.cache
def _connected(url: str, timeout_seconds: float) -> _Connection:
    return _Connection(connect(url, timeout_seconds=timeout_seconds))


def _refuse(signature: str, *_: Array) -> list[Array]:
    text = f"signature {signature} looks up in the graph, and the rows are in Redis. Send the inputs of serving_default"
    raise StatusError(Code.UNIMPLEMENTED, text)


def _status(code: Code, error: Exception | str) -> StatusError:
    return StatusError(code, str(error).rstrip("."))
