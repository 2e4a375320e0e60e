"""What an export has, and where it comes from."""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from tpuembed.errors import ConfigError, reason
from tpuembed.manifest.entries import (
    LAYOUTS,
    ArrayEntry,
    BaseEntry,
    FeatureEntry,
    FileEntry,
    FromActivations,
    HistoryEntry,
    NamesEntry,
    Packing,
    RetrievalEntry,
    RowProofEntry,
    RowStoreEntry,
    StackEntry,
    TableEntry,
    TensorSpec,
    VocabularyEntry,
    check_inside,
)

__all__ = ["LOOKUP_SCOPE", "MANIFEST_PATH", "NAMES_FOLDER", "Folder", "Manifest"]

MANIFEST_PATH = Path("assets.extra") / "tpuembed.json"
NAMES_FOLDER: Final = "names"
"""The folder in a version with the files of `NamesEntry.arrays`."""
LOOKUP_SCOPE: Final = "tpuembed_lookup"
"""The name scope of a lookup's operations in an export. The server treats the scope as one operation. Each row of its
outputs depends only on the ids of that row, and entries of -1 after a row's ids change nothing.
"""
FORMAT: Final = 1
"""The format number. Readers refuse every other one. A new field does not raise it, because readers ignore unknown fields."""
REQUIRED: Final = ("base", "names", "retrieval", "row_store")
"""The fields that a reader has to understand if they are set. It would serve wrong rows, or lose files, if it ignored one. So
each that is set is listed in `requires`, and readers refuse names that they do not know.
"""


class Folder(Protocol):
    """The folder to read a manifest from: a `pathlib.Path`, or an object with these methods of one, such as a URL."""

    def __truediv__(self, name: Path, /) -> "Folder":
        """Return the path `name` below it."""

    def read_text(self, encoding: str) -> str:
        """Return the text of the file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """One export. It never contradicts itself: tables fill their stacks, and stacks share no byte of a file.

    Attributes:
        tool_version: version of the tpuembed that wrote it.
        source: the checkpoint's path, format and fingerprint.
        layout: one of LAYOUTS.
        tables, stacks: the table data. A mapped stack is a whole file.
        signatures: name -> {"inputs": {name: TensorSpec}, "outputs": {name: TensorSpec}}.
        files: all other files except this manifest, by their path inside the version directory. saved_model.pb is
            recorded with mapped paths relative to that directory, because the real ones depend on the server.
        errors: of the storage against float32, by table, as in the export's report.
        features: of a lookup-only export.
        vocabularies: of a whole model, sorted by layer.
        padding: of a whole model: its list inputs, by name, with their padding: -1, "" or "NaN".
        packing: of the signature `packed`.
        from_activations: of the signature of that name.
        finite: whether every value of the tables was checked, and is finite. False in exports that did not check.
        base: the version whose files this one links, with overlays for the rows that differ; None if all is its own.
        histories: of the tables whose rows are tracked, by table.
        names: of the tables that features look up in by name.
        retrieval: the index of candidates; None if the export is no retrieval.
        row_proof: which signatures keep rows apart. None if the server has to find out, as in compacted versions.
        row_store: where the rows of the stacks are; None if the version has its tables. A server needs --row-store for it.
    """

    tool_version: str
    source: Mapping[str, str]
    layout: str
    tables: tuple[TableEntry, ...]
    stacks: tuple[StackEntry, ...]
    signatures: Mapping[str, Mapping[str, Mapping[str, TensorSpec]]]
    files: Mapping[str, FileEntry] = dataclasses.field(default_factory=dict)
    errors: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    features: tuple[FeatureEntry, ...] = ()
    vocabularies: tuple[VocabularyEntry, ...] = ()
    padding: Mapping[str, int | str] = dataclasses.field(default_factory=dict)
    packing: Packing
    from_activations: FromActivations
    finite: bool = False
    base: BaseEntry | None = None
    histories: Mapping[str, HistoryEntry] = dataclasses.field(default_factory=dict)
    names: tuple[NamesEntry, ...] = ()
    retrieval: RetrievalEntry | None = None
    row_proof: RowProofEntry | None = None
    row_store: RowStoreEntry | None = None

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ConfigError(f"its layout is {self.layout!r}, and this version reads {', '.join(LAYOUTS)}.")
        _check_names(self)
        _check_arrays(self.arrays, mapped=self.layout == "mmap")
        _check_tables(self.tables, self.stacks)
        _check_activations(self.from_activations, self.signatures)
        if self.retrieval is not None:
            _check_retrieval(self.retrieval, self.tables, self.stacks)
        for file in self.files:
            check_inside(file)

    @property
    def arrays(self) -> tuple[ArrayEntry, ...]:
        """Return the arrays in files: of all stacks, of the indices of names, and of the index of candidates."""
        elsewhere = () if self.row_store is None else self.row_store.arrays
        of_stacks = tuple(array for stack in self.stacks for array in stack.arrays if array.name not in elsewhere)
        of_index = () if self.retrieval is None else self.retrieval.arrays.values()
        return *of_stacks, *(array for entry in self.names for array in entry.arrays), *of_index

    def table_files(self) -> dict[str, int]:
        """Return the bytes of each data file of the stacks and of names, by its path inside the version directory."""
        sizes: dict[str, int] = {}
        for array in self.arrays:
            sizes[array.file] = max(sizes.get(array.file, 0), array.offset + array.size)
        return sizes

    @property
    def tables_fingerprint(self) -> str:
        """Return a text that is equal for versions whose stacks are the same bytes of the same tables, in any layout."""
        stacks = [(s.name, s.rows, s.dim, s.storage, [(a.size, a.crc32c) for a in s.arrays]) for s in self.stacks]
        tables = [dataclasses.asdict(table) for table in self.tables]
        return hashlib.sha256(json.dumps([stacks, tables], sort_keys=True).encode()).hexdigest()

    def write(self, version_dir: Path) -> None:
        """Write the manifest into `version_dir`, and create its folder."""
        path = version_dir / MANIFEST_PATH
        path.parent.mkdir(parents=True, exist_ok=True)
        requires = [name for name in REQUIRED if getattr(self, name)]
        text = json.dumps({"format": FORMAT, "requires": requires, **dataclasses.asdict(self)}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, version_dir: Folder) -> "Manifest | None":
        """Return the manifest of `version_dir`, or None if there is none (a SavedModel that tpuembed did not write).

        Raises:
            ConfigError: the file is not a valid manifest; the message names the file.
        """
        path = version_dir / MANIFEST_PATH
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"manifest {path}: cannot be read: {reason(error)}.") from None
        try:
            return cls._from_dict(json.loads(text))
        except KeyError as error:
            fault = f"it lacks the field {error}"
        except (msgspec.ValidationError, ValueError, TypeError, RecursionError) as error:
            fault = reason(error).replace(". - at", " - at").removesuffix(".")
        raise ConfigError(f"manifest {path}: not a tpuembed manifest: {fault}. Export again.")

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> "Manifest":
        if value["format"] != FORMAT:
            raise ValueError(f"its format is {value['format']!r}, and this version of tpuembed reads {FORMAT}")
        if unknown := [name for name in value["requires"] if name not in REQUIRED]:
            raise ValueError(
                f"it requires {', '.join(map(str, unknown))}, and this version of tpuembed knows {', '.join(REQUIRED)}"
            )
        if missing := [field.name for field in dataclasses.fields(cls) if field.name not in value]:
            raise KeyError(missing[0])
        return msgspec.convert(value, cls)


def _check_arrays(arrays: Sequence[ArrayEntry], *, mapped: bool) -> None:
    _check_distinct("stack", [array.name for array in arrays])
    in_place = sorted(arrays, key=attrgetter("file", "offset"))
    for file, group in groupby(in_place, key=attrgetter("file")):
        shared = list(group)
        if mapped and (len(shared) > 1 or shared[0].offset):
            raise ConfigError(f"stack {shared[-1].name!r} is mapped, but is not the only content of {file}.")
        for one, other in pairwise(shared):
            if one.offset + one.size > other.offset:
                raise ConfigError(f"stacks {one.name!r} and {other.name!r} overlap in {file}.")


def _check_tables(tables: Iterable[TableEntry], stacks: Iterable[StackEntry]) -> None:
    _check_distinct("table", [table.name for table in tables])
    by_stack: dict[str, list[TableEntry]] = {stack.name: [] for stack in stacks}
    for table in sorted(tables, key=attrgetter("row_offset")):
        if table.stack not in by_stack:
            raise ConfigError(f"table {table.name!r} is in stack {table.stack!r}, which does not exist.")
        by_stack[table.stack].append(table)
    for stack in stacks:
        _check_filled(stack, by_stack[stack.name])


def _check_names(manifest: Manifest) -> None:
    """Raise ConfigError unless every feature that takes names has those of its table, and every entry is of a table."""
    _check_distinct("names of table", [entry.table for entry in manifest.names])
    names = {entry.table: entry for entry in manifest.names}
    if missing := sorted(names.keys() - {table.name for table in manifest.tables}):
        raise ConfigError(f"names: table {missing[0]!r} does not exist.")
    for feature in (*manifest.features, *manifest.from_activations.features):
        if feature.names and (feature.table not in names or names[feature.table].dtype != feature.names):
            raise ConfigError(
                f"feature {feature.name!r}: table {feature.table!r} has no names of type {feature.names}."
            )


def _check_activations(
    given: FromActivations, signatures: Mapping[str, Mapping[str, Mapping[str, TensorSpec]]]
) -> None:
    """Raise ConfigError unless the signatures have the inputs of all features."""
    for one in given.features:
        wanted = [("from_activations", one.name), ("serving_default", one.ids)]
        wanted += [("serving_default", one.weights)] if one.weighted else []
        for signature, name in wanted:
            if name not in signatures.get(signature, {}).get("inputs", {}):
                raise ConfigError(
                    f"from_activations: feature {one.name!r} has input {name!r} of {signature}, which does not exist."
                )


def _check_retrieval(entry: RetrievalEntry, tables: Iterable[TableEntry], stacks: Iterable[StackEntry]) -> None:
    """Raise ConfigError unless the candidates are all rows of a stack, and each array of the index has its size."""
    table = next((table for table in tables if table.name == entry.table), None)
    stack = next((stack for stack in stacks if table is not None and stack.name == table.stack), None)
    if table is None or stack is None or stack.overlay or table.rows != stack.rows or stack.rows % entry.block_rows:
        raise ConfigError(
            f"retrieval: table {entry.table!r} does not have a stack of its own, of whole blocks of {entry.block_rows} rows."
        )
    if not entry.arrays:
        return
    shapes = {"ids": (stack.rows, 8)}
    shapes |= {"tags": (stack.rows, 8)} if entry.has_tags else {}
    if entry.index == "ivf":
        shapes |= {"centroids": (entry.partitions, 4 * table.dim), "first_blocks": (entry.partitions + 1, 8)}
    if entry.ids == "string":
        shapes |= {"offsets": (entry.candidates + 1, 8), "names": (entry.arrays["names"].rows, 1)}
    if shapes.keys() != entry.arrays.keys():
        raise ConfigError(
            f"retrieval: an index with these options has the arrays {', '.join(sorted(shapes))}, not "
            f"{', '.join(sorted(entry.arrays))}."
        )
    for name, (rows, row_bytes) in shapes.items():
        array = entry.arrays[name]
        if (array.rows, array.size) != (rows, rows * row_bytes):
            raise ConfigError(
                f"retrieval: {name} takes {rows} rows, {rows * row_bytes} bytes, not {array.rows} rows, {array.size} bytes."
            )


def _check_filled(stack: StackEntry, tables: Iterable[TableEntry]) -> None:
    """Raise ConfigError unless `tables`, in row order, cover each row of `stack` exactly once."""
    rows = 0
    for table in tables:
        if table.dim != stack.dim:
            raise ConfigError(
                f"table {table.name!r} has width {table.dim}, but its stack {stack.name!r} has {stack.dim}."
            )
        if table.row_offset != rows:
            raise ConfigError(
                f"table {table.name!r} starts at row {table.row_offset} of {stack.name!r}, not at {rows}."
            )
        rows += table.rows
    if rows != stack.rows:
        raise ConfigError(f"stack {stack.name!r} has {stack.rows} rows, but its tables have {rows}.")


def _check_distinct(what: str, names: list[str]) -> None:
    twice = sorted(str(name) for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ConfigError(f"{what} {twice[0]!r} is listed twice.")
