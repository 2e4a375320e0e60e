"""The content and origin of an export: the contract between exporter and server, free of TensorFlow.

The manifest is at `<version>/assets.extra/tpuembed.json`; TensorFlow Serving ignores that folder.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol, TypeVar

from tpuembed.errors import ConfigError, reason

__all__ = [
    "LAYOUTS",
    "LOOKUP_SCOPE",
    "MANIFEST_PATH",
    "NAMES_FOLDER",
    "STORAGE_TYPES",
    "ActivationEntry",
    "ArrayEntry",
    "BaseEntry",
    "FeatureEntry",
    "FileEntry",
    "Folder",
    "FromActivations",
    "HistoryEntry",
    "Manifest",
    "NamesEntry",
    "OverlayEntry",
    "PackedInput",
    "PackedOutput",
    "Packing",
    "QuantizationEntry",
    "RetrievalEntry",
    "StackEntry",
    "TableEntry",
    "TensorSpec",
    "VocabularyEntry",
]

MANIFEST_PATH = Path("assets.extra") / "tpuembed.json"
NAMES_FOLDER: Final = "names"
"""The folder in a version with the files of `NamesEntry.arrays`."""
LOOKUP_SCOPE: Final = "tpuembed_lookup"
"""The name scope of a lookup's operations in an export. The server treats the scope as one operation. Each row of its
outputs depends only on the ids of that row, and entries of -1 after a row's ids change nothing.
"""
FORMAT: Final = 1
"""The format number of a version whose tables are its own. A new field that readers need raises it. Other new fields do
not, because readers ignore unknown fields.
"""
OVERLAY_FORMAT: Final = 2
"""The format number of a version that has a base."""
NAMES_FORMAT: Final = 3
"""The format number of a version with features that take names. An older server would look names up as row numbers."""
RETRIEVAL_FORMAT: Final = 4
"""The format number of a version with an index of candidates. Older tools would not keep its arrays."""
KEYED_FORMAT: Final = 5
"""The format number of a version whose unknown names are hashed with a key. An older server would hash them without it."""
LAYOUTS: Final = ("variables", "mmap")
"""How a server gets the tables: loaded into variables, or mapped from their files."""

_ROW_BYTES: Final = {"float32": (4, 0), "bfloat16": (2, 0), "float16": (2, 0), "int8": (1, 8)}
"""Storage -> (bytes of an element, further bytes of a row: int8 has a float32 scale and centre in it)."""
STORAGE_TYPES: Final = tuple(_ROW_BYTES)
"""The types that tables can be stored as."""

_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Names of stacks, which are names of files too."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """An input or output of a signature: dtype name and shape; None is an unknown size, or an unknown rank."""

    dtype: str
    shape: tuple[int | None, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureEntry:
    """A feature of a lookup-only export: the input `name`, and how it is looked up.

    Attributes:
        table: its TableEntry has the range of ids.
        input: "id" for int64 [batch], or "ids" for int64 [batch, hot], padded with -1.
        weighted: whether `<name>_weights` is an input too.
        max_sequence_length: if positive, its rows are not combined.
        out_of_vocabulary: "error" if ids that are not rows fail the request; "zeros", or the row to take instead.
        combiner: of a list: "sum", "mean" or "sqrtn". Empty in exports that are older than this field.
        names: "string" or "int64" if `serving_default` takes names of rows in place of their numbers; see NamesEntry. The
            padding of a list is then "" or -1. The signature `packed` of an export of lookups always takes row numbers.
    """

    name: str
    table: str
    input: str
    weighted: bool
    max_sequence_length: int
    out_of_vocabulary: str | int
    combiner: str = ""
    names: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedInput:
    """Columns of the matrix that the signature `packed` takes: those of the input `name` of `serving_default`.

    Attributes:
        columns: number of columns; None for `hot` columns, padded with -1.
    """

    name: str
    columns: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedOutput:
    """Columns [start, stop) of the output `activations`: the output `name` of `serving_default`, [batch, *shape]."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
    """The signature `packed`: `ids`, int64 [batch, columns].

    Attributes:
        inputs: in the order of their columns; first those of a fixed number of columns. All others have the same number
            of columns in one request, `hot`, which follows from the width of the matrix.
        outputs: of a lookup-only export, whose only output is `activations`, float32 [batch, width]. None if the
            outputs are those of `serving_default`.
        left_out: the reason why there is no such signature; empty if there is one.
    """

    inputs: tuple[PackedInput, ...] = ()
    outputs: tuple[PackedOutput, ...] | None = None
    left_out: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationEntry(FeatureEntry):
    """A feature of a whole model: the input `name` of the signature `from_activations`, and how it is looked up.

    `input` is "id" for integers [batch, ...] that are looked up one by one, each to a row [dim], or "ids" for lists, int64
    [batch, hot], padded with -1. With `names`, the ids are names, and strings are padded with "". A weight of padding is NaN or 0.

    Attributes:
        ids: the input of `serving_default` that has its ids.
        weights: the input of `serving_default` that has their weights. Empty if it is not weighted.
    """

    ids: str
    weights: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FromActivations:
    """The signature `from_activations` of a whole model. Its outputs are those of `serving_default`.

    It takes one float32 activation for each feature, and the inputs of `serving_default` that are not looked up.

    Attributes:
        features: in any order.
        whole_tables: the tables that the signature itself reads, such as those whose rows a model scores.
        left_out: the reason why there is no such signature; empty if there is one.
    """

    features: tuple[ActivationEntry, ...] = ()
    whole_tables: tuple[str, ...] = ()
    left_out: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabularyEntry:
    """The vocabulary of a preprocessing layer in a whole model, at the time of the export.

    Attributes:
        layer: its name.
        size: number of entries, masks and out of vocabulary entries included.
        sha256: of its entries in the order of their numbers, each as LENGTH:ENTRY, in UTF-8.
        compared: whether it is known to be that of the training: equal to what the checkpoint holds, or of a model in memory.
    """

    layer: str
    size: int
    sha256: str
    compared: bool = False

    def __post_init__(self) -> None:
        _check_integers(self, size=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file as it was written: its size, and its CRC32C, unmasked."""

    size: int
    crc32c: int

    def __post_init__(self) -> None:
        _check_integers(self, size=0, crc32c=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationEntry:
    """The levels that the accelerator rounded a table's values to in training: `num_buckets`, from `lower` to `upper`."""

    num_buckets: int
    lower: float
    upper: float

    def __post_init__(self) -> None:
        _check_integers(self, num_buckets=2)
        bounds = [self.lower, self.upper]
        if (
            not all(type(bound) in (int, float) and math.isfinite(bound) for bound in bounds)
            or self.lower >= self.upper
        ):
            raise ConfigError(
                f"quantization: lower and upper must be two finite numbers, the lower first, got {self.lower!r} and "
                f"{self.upper!r}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableEntry:
    """A table's place in its stack: rows [row_offset, row_offset + rows) are its rows from `first_row` on.

    Attributes:
        quantization: applied to its values before they were stored; None if there was none, or if the export is older
            than this field.
        base_row_offset, base_rows: in a stack with an overlay: its rows [0, base_rows) are rows [base_row_offset,
            base_row_offset + base_rows) of the stack's file. The rows from `base_rows` on are all in the overlay.
    """

    name: str
    rows: int
    dim: int
    dtype: str
    stack: str
    row_offset: int
    first_row: int = 0
    quantization: QuantizationEntry | None = None
    base_row_offset: int = 0
    base_rows: int = 0

    def __post_init__(self) -> None:
        _check_integers(self, rows=1, dim=1, row_offset=0, first_row=0, base_row_offset=0, base_rows=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayEntry:
    """An array of the graph that is the content of a data file, or a part of it.

    Attributes:
        name: of the variable.
        key: its key in the bundle `variables/variables`.
        rows: its first dimension.
        file: the data file's path inside the version directory.
        offset, size: the place of its bytes in that file, in bytes.
        crc32c: of those bytes, unmasked.
    """

    name: str
    key: str
    rows: int
    file: str
    size: int
    crc32c: int
    offset: int = 0

    def __post_init__(self) -> None:
        _check_integers(self, rows=1, offset=0, size=1, crc32c=0)
        _check_inside(self.file)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamesEntry:
    """The names of a table's rows, which features take in place of row numbers.

    Name number n is the name of row `oov_buckets` + n of the table as it was trained.

    Attributes:
        table: its name.
        dtype: "string" or "int64".
        count: number of names.
        oov_buckets: the rows before the names, for unknown ones. Without them, unknown names follow out_of_vocabulary.
        is_keyed: whether the hash that chooses the bucket of an unknown name has a key. The graph has it.
        salt: text before each name when it is hashed; see `tpuembed.vocabulary`.
        arrays: in layout mmap the arrays of the index: keys, int64 [buckets, 4], and numbers, int32 [4 * buckets]. Each is
            a whole file of this version, also in an overlay. In layout variables they are variables of the bundle, and this
            is empty.
    """

    table: str
    dtype: str
    count: int
    oov_buckets: int = 0
    is_keyed: bool = False
    salt: str = ""
    arrays: tuple[ArrayEntry, ...] = ()

    def __post_init__(self) -> None:
        _check_integers(self, count=0, oov_buckets=0)
        if self.dtype not in ("string", "int64"):
            raise ConfigError(f"names of table {self.table!r}: unknown dtype {self.dtype!r}.")
        if not self.arrays:
            return
        keys, numbers = self.arrays
        if (keys.size, numbers.rows, numbers.size) != (32 * keys.rows, 4 * keys.rows, 16 * keys.rows):
            raise ConfigError(
                f"names of table {self.table!r}: {keys.rows} buckets take {32 * keys.rows} bytes of keys and {16 * keys.rows} of "
                f"numbers, not {keys.size} and {numbers.size}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalEntry:
    """The index of candidates that the signatures of a retrieval export search.

    A candidate has a place in the index, and its vector is that row of `table`. Places are in blocks of `block_rows`.

    Attributes:
        table: name of the table.
        candidates: how many there are.
        k: how many a request gets.
        metric: "dot", or "cosine" if the vectors have the length 1, and queries are divided by their length.
        index: "exact", or "ivf" if the candidates are in partitions, of which a search reads `nprobe`.
        ids: the type of the candidates' ids: "int64" or "string".
        has_tags: whether a candidate has tags.
        block_rows: rows of a block.
        partitions, nprobe: of an index "ivf".
        recall: (nprobe, the share of the `k` best candidates that a search of so many partitions finds, on average).
        measured_on: what the recall was measured with: "queries", "rows" of the query's table, or "candidates". Empty for an
            exact index.
        min_recall: that nprobe was chosen for.
        arrays: in layout mmap, by name, each a whole file of this version: `ids`, int64 [places], which has -1 at a place of
            padding. Of strings it has numbers n, and string n is the bytes from offsets[n] to offsets[n + 1] of `names`: `offsets`,
            int64 [candidates + 1], and `names`, uint8. With tags `tags`, int64 [places], the bits of a uint64. Of an index "ivf"
            `centroids`, float32 [partitions, dim], and `first_blocks`, int64 [partitions + 1]: the blocks of partition p are those
            from first_blocks[p] to before first_blocks[p + 1]; of an overlay, perhaps fewer than it has, because new candidates
            are in no partition. And of an overlay `fresh`, int64 [rows of the overlay]: their places. These rows are searched
            too, all of them. In layout variables they are variables, and this is empty.
    """

    table: str
    candidates: int
    k: int
    metric: str
    index: str
    ids: str
    has_tags: bool
    block_rows: int
    partitions: int = 0
    nprobe: int = 0
    recall: tuple[tuple[int, float], ...] = ()
    measured_on: str = ""
    min_recall: float | None = None
    arrays: Mapping[str, ArrayEntry] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_integers(self, candidates=1, k=1, block_rows=1, partitions=0, nprobe=0)
        for field, known in (("metric", ("dot", "cosine")), ("index", ("exact", "ivf")), ("ids", ("int64", "string"))):
            if getattr(self, field) not in known:
                raise ConfigError(
                    f"retrieval: {field} must be one of {', '.join(known)}, got {getattr(self, field)!r}."
                )
        if self.index == "ivf" and not 1 <= self.nprobe <= self.partitions:
            raise ConfigError(f"retrieval: nprobe must be from 1 to {self.partitions}, got {self.nprobe}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlayEntry:
    """The rows of a stack that are not those of its base.

    Attributes:
        base_rows: rows of the stack's own file, which is the base's.
        rows: stored rows, sorted by their number in the stack.
        words: int64; bit n % 32 of word n // 32 is set if row n is in `rows`. The upper half of a word, an int32, is one
            less than the number of bits that are set in all earlier words.
        crc32c: of all rows of the stack, in the bytes of a full export; None if it is not known.
    """

    base_rows: int
    rows: ArrayEntry
    words: ArrayEntry
    crc32c: int | None = None

    def __post_init__(self) -> None:
        _check_integers(self, base_rows=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseEntry:
    """The version that an export was written for, and whose data files it links.

    Attributes:
        version: its number in the MODEL_DIR of the export.
        fingerprint: Manifest.tables_fingerprint of it.
    """

    version: int
    fingerprint: str

    def __post_init__(self) -> None:
        _check_integers(self, version=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """The RowHistory of a table when it was exported."""

    spans: tuple[tuple[str, int], ...]
    updates: int

    def __post_init__(self) -> None:
        _check_integers(self, updates=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackEntry:
    """Tables of one width and storage type in one variable.

    Attributes:
        name: the variable's name.
        key: its key in the bundle `variables/variables`.
        rows, dim, storage: its shape and dtype.
        file: the data file's path inside the version directory.
        offset, size: the place of its bytes in that file, in bytes.
        crc32c: of those bytes, unmasked.
        base_file: in an export with a base: the path of the same file in the base. Empty if the export wrote the file.
        overlay: the rows that replace those in `file`; None if there are none.
    """

    name: str
    key: str
    rows: int
    dim: int
    storage: str
    file: str
    offset: int
    size: int
    crc32c: int
    base_file: str = ""
    overlay: OverlayEntry | None = None

    def __post_init__(self) -> None:
        _check_integers(self, rows=1, dim=1, offset=0, size=1, crc32c=0)
        if not _FILE_NAME.fullmatch(self.name):
            raise ConfigError(f"stack {self.name!r}: its name may have letters, digits, '_', '.' and '-' only.")
        _check_inside(self.file)
        if self.base_file:
            _check_inside(self.base_file)
        if self.storage not in _ROW_BYTES:
            raise ConfigError(f"stack {self.name!r}: unknown storage {self.storage!r}.")
        _check_size(
            self.name, f"{self.storage} [{self.file_rows}, {self.dim}]", self.file_rows * self.row_bytes, self.size
        )
        if self.overlay is not None:
            rows, words, count = self.overlay.rows, self.overlay.words, -(-self.rows // 32)
            _check_size(rows.name, f"{self.storage} [{rows.rows}, {self.dim}]", rows.rows * self.row_bytes, rows.size)
            _check_size(words.name, f"int64 [{count}]", 8 * count, words.size)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one stored row."""
        element, more = _ROW_BYTES[self.storage]
        return self.dim * element + more

    @property
    def file_rows(self) -> int:
        """Return the number of rows in `file`."""
        return self.rows if self.overlay is None else self.overlay.base_rows

    @property
    def arrays(self) -> tuple[ArrayEntry, ...]:
        """Return the arrays of the graph that hold its rows: that of `file` first."""
        own = ArrayEntry(
            name=self.name,
            key=self.key,
            rows=self.file_rows,
            file=self.file,
            offset=self.offset,
            size=self.size,
            crc32c=self.crc32c,
        )
        more = () if self.overlay is None else (self.overlay.rows, self.overlay.words)
        return own, *more


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
        tables_key: equal for versions whose stacks are the same bytes in files of their own.
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
    """

    tool_version: str
    source: Mapping[str, str]
    layout: str
    tables: tuple[TableEntry, ...]
    stacks: tuple[StackEntry, ...]
    signatures: Mapping[str, Mapping[str, Mapping[str, TensorSpec]]]
    files: Mapping[str, FileEntry] = dataclasses.field(default_factory=dict)
    errors: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    tables_key: str = ""
    features: tuple[FeatureEntry, ...] = ()
    vocabularies: tuple[VocabularyEntry, ...] = ()
    padding: Mapping[str, int | str] = dataclasses.field(default_factory=dict)
    packing: Packing = Packing(left_out="the export is older than this signature")
    from_activations: FromActivations = FromActivations(left_out="the export is older than this signature")
    finite: bool = False
    base: BaseEntry | None = None
    histories: Mapping[str, HistoryEntry] = dataclasses.field(default_factory=dict)
    names: tuple[NamesEntry, ...] = ()
    retrieval: RetrievalEntry | None = None

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
            _check_inside(file)

    @property
    def arrays(self) -> tuple[ArrayEntry, ...]:
        """Return the arrays of all stacks, of the indices of names, and of the index of candidates."""
        of_stacks = tuple(array for stack in self.stacks for array in stack.arrays)
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
        path.write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """Return the text of the file."""
        number = FORMAT if self.base is None else OVERLAY_FORMAT
        number = NAMES_FORMAT if self.names else number
        number = RETRIEVAL_FORMAT if self.retrieval is not None else number
        number = KEYED_FORMAT if any(entry.is_keyed for entry in self.names) else number
        return json.dumps({"format": number, **dataclasses.asdict(self)}, indent=1) + "\n"

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
        except (TypeError, AttributeError):
            fault = "a field has a value of another type"
        except (ValueError, RecursionError) as error:
            fault = reason(error).removesuffix(".")
        raise ConfigError(f"manifest {path}: not a tpuembed manifest: {fault}. Export again.")

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> "Manifest":
        if value["format"] not in (FORMAT, OVERLAY_FORMAT, NAMES_FORMAT, RETRIEVAL_FORMAT, KEYED_FORMAT):
            raise ValueError(f"its format is {value['format']!r}, and this version reads {FORMAT} to {KEYED_FORMAT}")
        value["tables"] = tuple(_table(entry) for entry in value["tables"])
        value["stacks"] = tuple(_stack(entry) for entry in value["stacks"])
        value["errors"] = {name: dict(entry) for name, entry in value.get("errors", {}).items()}
        base = value.get("base")
        value["base"] = None if base is None else _entry(BaseEntry, base)
        value["files"] = {path: _entry(FileEntry, entry) for path, entry in value["files"].items()}
        value["features"] = tuple(_entry(FeatureEntry, entry) for entry in value.get("features", ()))
        value["vocabularies"] = tuple(_entry(VocabularyEntry, entry) for entry in value.get("vocabularies", ()))
        value["histories"] = {name: _history(entry) for name, entry in value.get("histories", {}).items()}
        value["names"] = tuple(_names(entry) for entry in value.get("names", ()))
        retrieval = value.get("retrieval")
        value["retrieval"] = None if retrieval is None else _retrieval(retrieval)
        if "packing" in value:
            value["packing"] = _packing(value["packing"])
        if "from_activations" in value:
            value["from_activations"] = _from_activations(value["from_activations"])
        value["signatures"] = {name: _signature(sides) for name, sides in value["signatures"].items()}
        return _entry(cls, value)


def _entry(kind: type[T], value: Mapping[str, Any]) -> T:
    """Return the `kind` that has the fields of `value`. Other fields are ignored. Raises KeyError if one is missing."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(kind)  # type: ignore[arg-type]
    needed = (field for field in fields if field.default is field.default_factory is dataclasses.MISSING)
    if missing := [field.name for field in needed if field.name not in value]:
        raise KeyError(missing[0])
    return kind(**{field.name: value[field.name] for field in fields if field.name in value})


def _table(value: Mapping[str, Any]) -> TableEntry:
    quantization = value.get("quantization")
    found = None if quantization is None else _entry(QuantizationEntry, quantization)
    return _entry(TableEntry, {**value, "quantization": found})


def _stack(value: Mapping[str, Any]) -> StackEntry:
    overlay = value.get("overlay")
    if overlay is not None:
        arrays = {name: _entry(ArrayEntry, overlay[name]) for name in ("rows", "words")}
        overlay = _entry(OverlayEntry, {**overlay, **arrays})
    return _entry(StackEntry, {**value, "overlay": overlay})


def _names(value: Mapping[str, Any]) -> NamesEntry:
    return _entry(NamesEntry, {**value, "arrays": tuple(_entry(ArrayEntry, one) for one in value["arrays"])})


def _retrieval(value: Mapping[str, Any]) -> RetrievalEntry:
    arrays = {name: _entry(ArrayEntry, one) for name, one in value["arrays"].items()}
    recall = tuple((int(nprobe), float(share)) for nprobe, share in value["recall"])
    return _entry(RetrievalEntry, {**value, "arrays": arrays, "recall": recall})


def _history(value: Mapping[str, Any]) -> HistoryEntry:
    return _entry(HistoryEntry, {**value, "spans": tuple((str(token), int(start)) for token, start in value["spans"])})


def _packing(value: Mapping[str, Any]) -> Packing:
    inputs = tuple(_entry(PackedInput, entry) for entry in value["inputs"])
    outputs = value["outputs"]
    if outputs is not None:
        outputs = tuple(_entry(PackedOutput, {**entry, "shape": tuple(entry["shape"])}) for entry in outputs)
    return Packing(inputs=inputs, outputs=outputs, left_out=value["left_out"])


def _from_activations(value: Mapping[str, Any]) -> FromActivations:
    return FromActivations(
        features=tuple(_entry(ActivationEntry, entry) for entry in value["features"]),
        whole_tables=tuple(value["whole_tables"]),
        left_out=value["left_out"],
    )


def _signature(sides: Mapping[str, Any]) -> dict[str, dict[str, TensorSpec]]:
    return {side: {name: _tensor_spec(spec) for name, spec in specs.items()} for side, specs in sides.items()}


def _tensor_spec(spec: Mapping[str, Any]) -> TensorSpec:
    shape = spec["shape"]
    return TensorSpec(dtype=spec["dtype"], shape=None if shape is None else tuple(shape))


def _check_integers(entry: Any, **minimums: int) -> None:
    """Raise ConfigError unless these fields of `entry` are integers of at least the given minimums."""
    kind, name = type(entry).__name__.removesuffix("Entry").lower(), getattr(entry, "name", None)
    for field, minimum in minimums.items():
        value = getattr(entry, field)
        if type(value) is not int or not minimum <= value < 2**63:
            what = kind if name is None else f"{kind} {name!r}"
            raise ConfigError(f"{what}: {field} must be an integer of at least {minimum}, got {value!r}.")


def _check_inside(file: object) -> None:
    """Raise ConfigError unless `file` is a path to a file inside the version directory."""
    parts = PurePosixPath(file).parts if isinstance(file, str) else ()
    if not parts or "/".join(parts) != file or ".." in parts or parts[0] == "/" or "\0" in str(file):
        raise ConfigError(f"file {file!r} is not a path inside the export.")


def _check_size(name: str, what: str, needed: int, size: int) -> None:
    if size != needed:
        raise ConfigError(f"stack {name!r}: {what} takes {needed} bytes, not {size}.")


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
    if table is None or stack is None or table.rows != stack.rows or stack.rows % entry.block_rows:
        raise ConfigError(
            f"retrieval: table {entry.table!r} does not have a stack of its own, of whole blocks of {entry.block_rows} rows."
        )
    if not entry.arrays:
        return
    shapes = {"ids": (stack.rows, 8)}
    shapes |= {"tags": (stack.rows, 8)} if entry.has_tags else {}
    if entry.index == "ivf":
        shapes |= {"centroids": (entry.partitions, 4 * table.dim), "first_blocks": (entry.partitions + 1, 8)}
    if stack.overlay is not None:
        shapes["fresh"] = (stack.overlay.rows.rows, 8)
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
        if stack.overlay and table.base_row_offset + table.base_rows > stack.file_rows:
            raise ConfigError(f"table {table.name!r} has rows after the {stack.file_rows} rows of {stack.file}.")
        rows += table.rows
    if rows != stack.rows:
        raise ConfigError(f"stack {stack.name!r} has {stack.rows} rows, but its tables have {rows}.")


def _check_distinct(what: str, names: list[str]) -> None:
    twice = sorted(str(name) for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ConfigError(f"{what} {twice[0]!r} is listed twice.")
