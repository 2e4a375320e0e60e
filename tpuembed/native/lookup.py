"""Lookups of lookup-only exports by `native/src/lookup.c`, without TensorFlow.

TensorFlow's gather copies each row before it is summed. The C library sums rows where they are, and prefetches them. It also
finds the rows of names. It is compiled when the package is installed. Without a C compiler there is none, and callers use
TensorFlow.

One id gives the bits that the export's graph gives. Sums differ in their last bits, because the order differs.
"""

import contextlib
import copy
import ctypes
import functools
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError, TpuEmbedError, reason
from tpuembed.errors.ids import MOST_OF_NAME, Span, outside_message, unknown_name_texts
from tpuembed.manifest import STORAGE_TYPES, ArrayEntry, FeatureEntry, Manifest, NamesEntry, StackEntry, TableEntry
from tpuembed.runtime.cpus import available_cpus

__all__ = [
    "VARIANTS",
    "NativeLookups",
    "available",
    "group_of",
    "load_library",
    "mapped_array",
    "refusal",
    "variant",
]

Array = npt.NDArray[Any]

VARIANTS: Final = ("plain", "x86-64-v3", "x86-64-v4") if os.uname().machine == "x86_64" else ("plain",)
"""The builds in the library, by their number: for which processors."""

_LIBRARY: Final = Path(__file__).with_name("_lookup.so")
_KINDS: Final = ("id", "list", "sequence")
_COMBINERS: Final = ("sum", "mean", "sqrtn")
_POLICIES: Final = ("error", "zeros", "row")
_OK, _OUTSIDE = 0, 1
_THREADED_BYTES: Final = 2 << 20
"""A call that reads fewer bytes of rows stays on its thread: another one would take longer to start."""
_SLICES: Final = 4
"""Slices of a threaded call, by thread."""
_AHEAD_IDS: Final = 1 << 14
"""So many ids, or one example, are read ahead before their rows are looked up: their pages must fit into a small memory too."""
_RECENT_BITS: Final = 18
"""Read-ahead remembers up to 2^18 pages: 1 GiB of tables, in 2 MiB."""
_RECENT_SECONDS: Final = 1.0
"""How long a page counts as read. A page of frequent rows stays in memory longer, and one call for it takes a microsecond."""
_FEW_ROWS_BYTES: Final = 4 << 20
"""Up to this many bytes of float32 rows, the graph checks a group's lists together: see `export/graph/feature_groups.py`."""


class _Feature(ctypes.Structure):
    """`struct feature` of lookup.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "overlay", "words")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("overlay_rows", "storage", "dim", "row_bytes", "ids", "row_offset", "base_row_offset"),
                *("base_rows", "kind", "combiner", "length", "policy", "policy_row", "divides_weights"),
            )
        ),
    ]


_INPUT: Final = np.dtype(
    [(name, np.int64) for name in ("ids", "id_stride", "hot", "weights", "weight_stride", "out", "out_stride")]
)
"""`struct input` of lookup.c. Pointers are integers."""


class _Names(ctypes.Structure):
    """`struct names` of lookup.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "numbers")),
        *((name, ctypes.c_int64) for name in ("buckets", "oov_buckets", "salt_bytes", "padded")),
    ]


class _Pages(ctypes.Structure):
    """`struct pages` of lookup.c."""

    _fields_ = [("page_bytes", ctypes.c_uint64), ("recent", ctypes.c_void_p), ("recent_bits", ctypes.c_int64)]


class _Place(ctypes.Structure):
    """`struct place` of lookup.c."""

    _fields_ = [("example", ctypes.c_int64), ("id", ctypes.c_int64)]


@functools.cache
def load_library() -> ctypes.CDLL | str:
    """Return the library, or the reason why there is none."""
    if not _LIBRARY.is_file():
        return "the package was installed without its C library; install a C compiler and tpuembed again"
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        library.tpuembed_layout.restype = library.tpuembed_look_up.restype = ctypes.c_int64
        library.tpuembed_best_variant.restype = library.tpuembed_find_outside.restype = ctypes.c_int64
        library.tpuembed_look_up.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3]
        library.tpuembed_read_ahead.restype = None
        library.tpuembed_read_ahead.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 3]
        library.tpuembed_find_outside.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_void_p]
        library.tpuembed_search.restype = None
        given: tuple[Any, ...] = ctypes.c_int64, *[ctypes.c_void_p] * 3
        library.tpuembed_search.argtypes = [
            *given,
            ctypes.c_int64,
            ctypes.c_void_p,
            *given,
            ctypes.c_void_p,
            ctypes.c_int64,
        ]
        library.tpuembed_find_names.restype = ctypes.c_int64
        strings: tuple[Any, ...] = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64
        library.tpuembed_find_names.argtypes = [*[ctypes.c_void_p] * 2, *strings, ctypes.c_void_p]
        layout = library.tpuembed_layout()
    except (OSError, AttributeError) as error:
        return f"{_LIBRARY.name} cannot be loaded: {str(error).rstrip('.')}; install tpuembed again"
    own = 1000 * (1000 * ctypes.sizeof(_Names) + ctypes.sizeof(_Feature)) + _INPUT.itemsize
    return library if layout == own else f"{_LIBRARY.name} has layout {layout}, not {own}; install tpuembed again"


def available() -> str:
    """Return "" if native lookups run on this machine, else the reason why not."""
    library = load_library()
    return library if isinstance(library, str) else ""


def variant() -> str:
    """Return the name of the build that this processor runs, one of VARIANTS. It needs `available`."""
    library = load_library()
    assert not isinstance(library, str), library
    return VARIANTS[library.tpuembed_best_variant()]


def refusal(manifest: Manifest) -> str:
    """Return "" if native lookups can answer for the export, else the reason why not."""
    if not manifest.features:
        return "it is a whole model, and native lookups are for exports of lookups"
    if manifest.layout != "mmap" and manifest.row_store is None:
        return f"its layout is {manifest.layout}, and native lookups map tables: export with layout mmap"
    return ""


class NativeLookups:
    """The lookups of one export. Its methods may be called by many threads at once.

    Attributes:
        features: in the order in which a graph checks their ids: groups of one kind, stack, combiner and policy.
        reads_ahead: whether the kernel is told all pages of a call before the first row is read. It is for tables that are
            larger than the memory: the disk then reads many pages at once, instead of one after the other.
    """

    def __init__(
        self,
        manifest: Manifest,
        version_dir: Path,
        *,
        threads: int | None = None,
        variant: str | None = None,
        divides_weights: bool = False,
    ) -> None:
        """Map the tables of the export at `version_dir`.

        Args:
            manifest: of the export.
            version_dir: the version's folder.
            threads: at most so many work on one call. None for all processors that this process may use.
            variant: one of VARIANTS that this processor runs. None for the best.
            divides_weights: whether the combiner divides each weight before it is multiplied, as the layer does. An export of
                lookups divides the sum. Only large and small numbers show the difference.

        Raises:
            ConfigError: there is no library (`available`), the export is not for it (`refusal`), contradicts itself, or
                lacks a file.
        """
        library = load_library()
        if fault := available() or refusal(manifest):
            raise ConfigError(f"native lookups of {version_dir}: {fault}.")
        assert not isinstance(library, str)
        best: int = library.tpuembed_best_variant()
        self._variant = best if variant is None else VARIANTS.index(variant)
        if self._variant > best:
            raise ConfigError(f"native lookups: this processor runs {VARIANTS[best]}, not {variant}.")
        self._library, self._threads = library, available_cpus() if threads is None else threads
        tables = {table.name: table for table in manifest.tables}
        stacks = {stack.name: stack for stack in manifest.stacks}
        self._order = [one.name for one in manifest.features]
        self.features = tuple(sorted(manifest.features, key=lambda one: group_of(one, tables)))
        self._tables = [tables[one.table] for one in self.features]
        self._groups = [group_of(one, tables) for one in self.features]
        names = {entry.table: entry for entry in manifest.names}
        entries = [names[one.table] if one.names else None for one in self.features]
        elsewhere = () if manifest.row_store is None else manifest.row_store.arrays
        of_stacks = [array for name in {table.stack for table in self._tables} for array in stacks[name].arrays]
        of_stacks = [array for array in of_stacks if array.name not in elsewhere]
        of_names = [array for entry in entries if entry is not None for array in entry.arrays]
        self._arrays = {
            array.name: mapped_array(version_dir, array) for array in dict.fromkeys([*of_stacks, *of_names])
        }
        made = [
            _checked(one, table, stacks[table.stack], self._arrays, divides_weights)
            for one, table in zip(self.features, self._tables, strict=True)
        ]
        self._structs = (_Feature * len(made))(*made)
        self._finders = [
            None if entry is None else _NameFinder(one, entry, self._arrays)
            for one, entry in zip(self.features, entries, strict=True)
        ]
        self._lengths = [one.max_sequence_length if _kind(one) == "sequence" else 0 for one in self.features]
        self._widths = [table.dim * (length or 1) for table, length in zip(self._tables, self._lengths, strict=True)]
        self._row_bytes = [struct.row_bytes for struct in made]
        self._packing = None if manifest.packing.left_out else manifest.packing
        self._template = np.zeros(len(made), _INPUT)
        self._lists = np.array([_kind(one) != "id" for one in self.features])
        self._starts = np.cumsum([0, *self._widths[:-1]])
        self.reads_ahead = False
        self._rows: Mapping[str, Array] = {}
        self._recent = np.zeros(1 << _RECENT_BITS, np.uint64)  # takes no memory before it is used
        self._pages = _Pages(mmap.PAGESIZE, self._recent.ctypes.data, _RECENT_BITS)
        self._recent_until = 0.0

    def named(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return feature -> float32 [batch, dim] or [batch, max_sequence_length, dim], of the inputs of `serving_default`.

        Args:
            inputs: int64, or names of rows: int64, or arrays of dtype object with bytes.

        Raises:
            ConfigError: an id is outside its table, with the message of the export's graph; a name is unknown; or an input does
                not fit.
            TpuEmbedError: an overlay is damaged.
        """
        return self.pooled(self.rows_of(inputs), inputs)

    def rows_of(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Return the ids of each feature, in the order of `features`: int64 [batch] or [batch, hot], those of names included.

        Raises:
            ConfigError: a name is unknown, or an input does not fit.
        """
        pages = self._pages_to_read() if self.reads_ahead else None
        return [
            _aligned(inputs[one.name], one.name, np.int64, 2 - (_kind(one) == "id"))
            if finder is None
            else finder.rows_of(inputs[one.name], self._library, pages)
            for one, finder in zip(self.features, self._finders, strict=True)
        ]

    def pooled(self, arrays: Sequence[Array], inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return what `named` does for `arrays`, the ids that `rows_of` returned, and the weights in `inputs`."""
        batch = len(arrays[0])
        found, calls = {}, self._template.copy()
        kept: list[Array] = []
        for index, (one, ids) in enumerate(zip(self.features, arrays, strict=True)):
            if len(ids) != batch:
                raise ConfigError(
                    f"Input {one.name} has {len(ids)} rows, but input {self.features[0].name} has {batch}. Send as many."
                )
            length, dim = self._lengths[index], self._tables[index].dim
            out = np.empty((batch, length, dim) if length else (batch, dim), np.float32)
            calls[index] = (*_pointer(ids), 0, 0, out.ctypes.data, self._widths[index])
            if one.weighted:
                weights = _aligned(inputs[f"{one.name}_weights"], f"{one.name}_weights", np.float32, 2)
                if weights.shape != ids.shape:
                    raise ConfigError(
                        f"Input {one.name}_weights has shape {list(weights.shape)}, but input {one.name} has "
                        f"{list(ids.shape)}. Send a weight for each id."
                    )
                address, stride, _ = _pointer(weights)
                calls["weights"][index], calls["weight_stride"][index] = address, stride
                kept.append(weights)
            found[one.name] = out
        self._run(calls, batch, is_packed=False)
        return {name: found[name] for name in self._order}

    def in_place_of(self, tables: Mapping[str, Array]) -> "NativeLookups":
        """Return lookups in other rows than those of the export.

        Args:
            tables: maps tables to stored rows, uint8 [n, row_bytes]. An id of such a table is a place in its rows.
        """
        other = copy.copy(self)
        other._structs = type(self._structs)(*self._structs)
        other._rows = tables  # keeps them while a call reads them
        for struct, table in zip(other._structs, self._tables, strict=True):
            if table.name in tables:
                rows = tables[table.name]
                struct.rows, struct.overlay, struct.words = rows.ctypes.data, None, None
                struct.ids = struct.base_rows = len(rows)
                struct.row_offset = struct.base_row_offset = struct.policy_row = 0
        return other

    def packed(self, ids: Array, out: Array | None = None) -> Array:
        """Return `activations`, float32 [batch, width], of the matrix that the signature `packed` takes.

        Args:
            ids: int64 [batch, columns].
            out: where to write the activations. None for a new array.

        Raises:
            ConfigError: an id is outside its table, with the message of the export's graph; or the matrix does not fit.
            TpuEmbedError: an overlay is damaged.
        """
        if self._packing is None:
            raise ConfigError("the export has no signature packed. Use its named inputs.")
        matrix = _aligned(ids, "ids", np.int64, 2)
        batch, columns = matrix.shape
        lists = int(self._lists.sum())
        rest = columns - (len(self._lists) - lists)
        if rest < 0 or (rest % lists if lists else rest):
            raise ConfigError(
                f"Input ids has {columns} columns, which {len(self._lists) - lists} ids and {lists} lists of one length do "
                "not have. Send the columns that the manifest's packing lists."
            )
        width = int(sum(self._widths))
        activations = np.empty((batch, width), np.float32) if out is None else out
        if activations.shape != (batch, width) or activations.dtype != np.float32 or not activations.flags.c_contiguous:
            raise ConfigError(
                f"out must be a contiguous float32 [{batch}, {width}], got {activations.dtype} {list(activations.shape)}."
            )
        calls = self._template.copy()
        calls["hot"] = hots = np.where(self._lists, rest // max(lists, 1), 1)
        address, stride, _ = _pointer(matrix)
        calls["ids"] = address + 8 * (np.cumsum(hots) - hots)
        calls["id_stride"] = stride
        calls["out"] = activations.ctypes.data + 4 * self._starts
        calls["out_stride"] = width
        self._run(calls, batch, is_packed=True)
        return activations

    def _run(self, calls: Array, batch: int, *, is_packed: bool) -> None:
        code = self._look_up_in_parts(calls, batch) if self.reads_ahead else self._look_up(calls, 0, batch)
        if code == _OUTSIDE:
            raise ConfigError(self._outside(calls, batch, is_packed))
        if code != _OK:
            raise TpuEmbedError(
                "an overlay of the export is damaged: its words contradict its rows. Verify the export."
            )

    def _look_up_in_parts(self, calls: Array, batch: int) -> int:
        """Look up the examples in parts. The kernel reads the pages of a part, many at once, before its rows are used."""
        code, step = _OK, max(_AHEAD_IDS // max(int(calls["hot"].sum()), 1), 1)
        pages, structs = self._pages_to_read(), ctypes.addressof(self._structs)
        for begin in range(0, batch, step):
            end = min(begin + step, batch)
            self._library.tpuembed_read_ahead(pages, structs, calls.ctypes.data, len(calls), begin, end)
            code = max(code, self._look_up(calls, begin, end))
        return code

    def _pages_to_read(self) -> int:
        """Return the address of the struct with the pages that were read not long ago. Older ones are forgotten."""
        if time.monotonic() > self._recent_until:
            self._recent.fill(0)
            self._recent_until = time.monotonic() + _RECENT_SECONDS
        return ctypes.addressof(self._pages)

    def _look_up(self, calls: Array, begin: int, end: int) -> int:
        """Look up the examples [begin, end) by one call, or by several threads if they are many. Return the greatest code."""
        threads = self._threads
        if threads > 1:
            threads = min(threads, 1 + int((end - begin) * (calls["hot"] @ self._row_bytes)) // _THREADED_BYTES)
        arguments = self._variant, ctypes.addressof(self._structs), calls.ctypes.data, len(calls)
        if threads == 1:
            code: int = self._library.tpuembed_look_up(*arguments, begin, end)
            return code
        bounds = np.linspace(begin, end, min(threads * _SLICES, end - begin) + 1, dtype=np.int64).tolist()
        tasks = [
            functools.partial(self._library.tpuembed_look_up, *arguments, *pair) for pair in itertools.pairwise(bounds)
        ]
        return max(_in_threads(threads, tasks))

    def _outside(self, calls: Array, batch: int, is_packed: bool) -> str:
        """Return the message for the id that a graph reports: the first one of the first group that has one."""
        for _, members in itertools.groupby(range(len(self.features)), lambda index: self._groups[index]):
            group = list(members)
            found = []
            for index in group:
                place = _Place()
                struct = ctypes.addressof(self._structs) + index * ctypes.sizeof(_Feature)
                if self._library.tpuembed_find_outside(
                    struct, calls.ctypes.data + index * _INPUT.itemsize, batch, ctypes.addressof(place)
                ):
                    found.append((index, place.example, place.id))
            if found:
                index, row, number = (
                    found[0]
                    if self._is_by_feature(calls, group, batch, is_packed)
                    else min(found, key=lambda one: one[1])
                )
                table = self._tables[index]
                span = Span(table.name, table.rows)
                return outside_message(self.features[index].name, span, number, row)
        raise TpuEmbedError("the ids changed during the lookup. Do not write to an input until the call returns.")

    def _is_by_feature(self, calls: Array, group: Sequence[int], batch: int, is_packed: bool) -> bool:
        """Return True if the graph checks the features one by one, False if example by example."""
        if not self._lists[group[0]]:
            return not is_packed
        few = max(_FEW_ROWS_BYTES // (4 * self._tables[group[0]].dim), 1)
        return batch * int(calls["hot"][group].sum()) > few


class _NameFinder:
    """Finds the rows of the names that a feature takes."""

    def __init__(self, feature: FeatureEntry, entry: NamesEntry, arrays: Mapping[str, Array]) -> None:
        if not entry.arrays:
            raise ConfigError(
                f"names of table {entry.table!r}: their index is not in files of the export. Export again."
            )
        keys, numbers = entry.arrays
        self._feature, self._entry, self._salt = feature, entry, entry.salt.encode()
        self._struct = _Names(
            keys=arrays[keys.name].ctypes.data,
            numbers=arrays[numbers.name].ctypes.data,
            buckets=keys.rows,
            oov_buckets=entry.oov_buckets,
            salt_bytes=len(self._salt),
            padded=_kind(feature) != "id",
        )

    def rows_of(self, given: Array, library: ctypes.CDLL, pages: int | None) -> Array:
        """Return the row of each name, int64 of the shape of `given`.

        Raises:
            ConfigError: a name is unknown, and the feature has neither buckets nor a policy for it; or `given` has no names.
        """
        feature, content, rank = self._feature, None, 2 - (_kind(self._feature) == "id")
        if self._entry.dtype == "string":
            names = _strings(given, feature.name, rank)
            values = np.fromiter(map(len, names), np.int64, len(names))
            content = self._salt + self._salt.join(names) if self._salt else b"".join(names)
        else:
            values = np.ascontiguousarray(_aligned(given, feature.name, np.int64, rank))
        rows = np.empty(given.shape, np.int64)
        unknown = library.tpuembed_find_names(
            pages, ctypes.addressof(self._struct), content, values.ctypes.data, values.size, rows.ctypes.data
        )
        if unknown >= 0 and feature.out_of_vocabulary == "error":
            raise ConfigError(self._unknown(given.reshape(-1)[unknown], unknown // (rows.size // len(rows))))
        return rows

    def _unknown(self, name: Any, row: int) -> str:
        before, between, after = unknown_name_texts(self._feature.name, self._entry.table, self._entry.count)
        text = str(name) if not isinstance(name, bytes) else name[:MOST_OF_NAME].decode(errors="replace")
        shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
        more = "..." if isinstance(name, bytes) and len(name) > MOST_OF_NAME else ""
        return f"{before}{shown}{more}{between}{row}{after}"


def _strings(given: Array, name: str, rank: int) -> list[bytes]:
    """Return the strings of an array in one list. Raises ConfigError if one is not of type bytes."""
    if given.dtype == object and given.ndim == rank:
        names: list[bytes] = given.reshape(-1).tolist()
        if all(kind is bytes for kind in set(map(type, names))):
            return names
    shape = "[batch]" if rank == 1 else "[batch, hot]"
    raise ConfigError(
        f"Input {name} must be bytes {shape}, in an array of dtype object, got {given.dtype} {list(given.shape)}."
    )


def _kind(feature: FeatureEntry) -> str:
    if feature.input == "id":
        return "id"
    return "sequence" if feature.max_sequence_length else "list"


def group_of(feature: FeatureEntry, tables: Mapping[str, TableEntry]) -> tuple[Any, ...]:
    """Return the group of a feature in the graph, as a key that sorts like it: see `export/graph/feature_groups.py`."""
    if feature.table not in tables:
        raise ConfigError(
            f"feature {feature.name!r} is of table {feature.table!r}, which the export does not have. Export again."
        )
    kind = _kind(feature)
    policy = feature.out_of_vocabulary if isinstance(feature.out_of_vocabulary, str) else "row"
    alone = feature.name if kind == "sequence" else ""
    combiner = feature.combiner if kind == "list" else ""
    return _KINDS.index(kind), tables[feature.table].stack, combiner, feature.weighted, policy, alone


def mapped_array(version_dir: Path, array: ArrayEntry) -> Array:
    """Map the bytes of an array of a stack."""
    path = version_dir / array.file
    try:
        mapped = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be mapped: {reason(error)}. Copy the version again.") from None
    if len(mapped) != array.size:
        raise ConfigError(f"{path} has {len(mapped)} bytes, but the manifest has {array.size}. Copy the version again.")
    return mapped


def _checked(
    feature: FeatureEntry, table: TableEntry, stack: StackEntry, arrays: Mapping[str, Array], divides_weights: bool
) -> _Feature:
    """Return the struct of a feature. The library trusts it."""
    given = feature.out_of_vocabulary
    policy, row = (given, 0) if isinstance(given, str) else ("row", int(given))
    kind, combiner = _kind(feature), feature.combiner or "sum"
    for what, value, known in (("out_of_vocabulary", policy, _POLICIES), ("combiner", combiner, _COMBINERS)):
        if value not in known:
            raise ConfigError(
                f"feature {feature.name!r}: {what} must be one of {', '.join(known)}, got {value!r}. Export again."
            )
    length = feature.max_sequence_length
    if type(length) is not int or length < 0 or not 0 <= row < table.rows:
        raise ConfigError(
            f"feature {feature.name!r}: its max_sequence_length or out_of_vocabulary is not of this export. Export again."
        )
    overlay = stack.overlay
    # Without files, rows are given later: see `in_place_of`.
    own, *more = [arrays[array.name].ctypes.data if array.name in arrays else None for array in stack.arrays]
    rows, words = more or (None, None)
    return _Feature(
        rows=own,
        overlay=rows,
        words=words,
        overlay_rows=overlay.rows.rows if overlay else 0,
        storage=STORAGE_TYPES.index(stack.storage),
        dim=stack.dim,
        row_bytes=stack.row_bytes,
        ids=table.rows,
        row_offset=table.row_offset,
        base_row_offset=table.row_offset,
        base_rows=table.rows,
        kind=_KINDS.index(kind),
        combiner=_COMBINERS.index(combiner),
        length=length,
        policy=_POLICIES.index(policy),
        policy_row=row,
        divides_weights=divides_weights,
    )


def _aligned(value: Array, name: str, dtype: type, rank: int) -> Array:
    """Return `value` with the elements of a row side by side, as the library reads them."""
    array = np.asarray(value)
    if array.dtype != dtype or array.ndim != rank:
        shape = "[batch]" if rank == 1 else "[batch, hot]"
        raise ConfigError(
            f"Input {name} must be {np.dtype(dtype).name} {shape}, got {array.dtype} {list(array.shape)}."
        )
    is_read_in_place = (
        array.flags.aligned
        and (rank == 1 or array.strides[1] == array.itemsize)
        and array.strides[0] % array.itemsize == 0
    )
    return array if is_read_in_place and array.dtype.isnative else np.ascontiguousarray(array, dtype)


def _pointer(array: Array) -> tuple[int, int, int]:
    """Return an array's address, the elements from one row to the next, and the elements of a row."""
    return array.ctypes.data, array.strides[0] // array.itemsize, array.shape[1] if array.ndim > 1 else 1


# ---- threads: all calls of a process share them


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(available_cpus() - 1, 1), "native-lookup")


os.register_at_fork(after_in_child=_pool.cache_clear)


def _in_threads(threads: int, tasks: Sequence[Callable[[], int]]) -> list[int]:
    """Run the tasks on this thread and on free ones of the pool. It never waits for a thread that other calls keep."""
    left, found = itertools.count(), list[int]()
    turns = [threading.Lock() for _ in range(threads - 1)]  # held by a helper that works, and by this thread at the end

    def work() -> None:
        while (index := next(left)) < len(tasks):
            found.append(tasks[index]())

    def help_out(turn: threading.Lock) -> None:
        if turn.acquire(blocking=False):
            try:
                work()
            finally:
                turn.release()

    try:
        with contextlib.suppress(RuntimeError):  # no thread can be started; the pool keeps what it was given
            for turn in turns:
                _pool().submit(help_out, turn)
        work()
    finally:  # they use arrays of the caller's
        for turn in turns:
            turn.acquire()
    assert len(found) == len(tasks), "a task failed on a thread of the pool"
    return found
