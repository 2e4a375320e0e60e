"""The entries of a manifest."""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from tpuembed.errors import ConfigError
from tpuembed.manifest.storages import STORAGES

__all__ = [
    "LAYOUTS",
    "ActivationEntry",
    "ArrayEntry",
    "BaseEntry",
    "FeatureEntry",
    "FileEntry",
    "FromActivations",
    "HistoryEntry",
    "NamesEntry",
    "OverlayEntry",
    "PackedInput",
    "PackedOutput",
    "Packing",
    "QuantizationEntry",
    "RetrievalEntry",
    "RowProofEntry",
    "RowStoreEntry",
    "StackEntry",
    "TableEntry",
    "TensorSpec",
    "VocabularyEntry",
    "check_integers",
]

LAYOUTS: Final = ("variables", "mmap")
"""How a server gets the tables: loaded into variables, or mapped from their files."""

_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Names of stacks, which are names of files too."""


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
        combiner: of a list: "sum", "mean" or "sqrtn".
        names: "string" or "int64" if `serving_default` takes names of rows in place of their numbers; see NamesEntry. The
            padding of a list is then "" or -1. The signature `packed` of an export of lookups always takes row numbers.
    """

    name: str
    table: str
    input: str
    weighted: bool
    max_sequence_length: int
    out_of_vocabulary: str | int
    combiner: str
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
        check_integers(self, size=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file as it was written: its size, and its CRC32C, unmasked."""

    size: int
    crc32c: int

    def __post_init__(self) -> None:
        check_integers(self, size=0, crc32c=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationEntry:
    """The levels that the accelerator rounded a table's values to in training: `num_buckets`, from `lower` to `upper`."""

    num_buckets: int
    lower: float
    upper: float

    def __post_init__(self) -> None:
        check_integers(self, num_buckets=2)
        if not math.isfinite(self.upper - self.lower) or self.lower >= self.upper:
            raise ConfigError(
                f"quantization: lower and upper must be two finite numbers, the lower first, got {self.lower!r} and "
                f"{self.upper!r}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableEntry:
    """A table's place in its stack: rows [row_offset, row_offset + rows) are its rows.

    Attributes:
        quantization: applied to its values before they were stored; None if there was none.
    """

    name: str
    rows: int
    dim: int
    dtype: str
    stack: str
    row_offset: int
    quantization: QuantizationEntry | None = None

    def __post_init__(self) -> None:
        check_integers(self, rows=1, dim=1, row_offset=0)


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
        check_integers(self, rows=1, offset=0, size=1, crc32c=0)
        check_inside(self.file)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamesEntry:
    """The names of a table's rows, which features take in place of row numbers.

    Name number n is the name of row `oov_buckets` + n of the table as it was trained.

    Attributes:
        table: its name.
        dtype: "string" or "int64".
        count: number of names.
        oov_buckets: the rows before the names, for unknown ones. Without them, unknown names follow out_of_vocabulary.
        salt: text before each name when it is hashed; see `tpuembed.vocabulary`.
        arrays: in layout mmap the arrays of the index: keys, int64 [buckets, 4], and numbers, int32 [4 * buckets]. Each is
            a whole file of this version, also in an overlay. In layout variables they are variables of the bundle, and this
            is empty.
    """

    table: str
    dtype: str
    count: int
    oov_buckets: int = 0
    salt: str = ""
    arrays: tuple[ArrayEntry, ...] = ()

    def __post_init__(self) -> None:
        check_integers(self, count=0, oov_buckets=0)
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
            from first_blocks[p] to before first_blocks[p + 1]. In layout variables they are variables, and this is empty.
    """

    table: str
    candidates: int
    k: int
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
        check_integers(self, candidates=1, k=1, block_rows=1, partitions=0, nprobe=0)
        for field, known in (("index", ("exact", "ivf")), ("ids", ("int64", "string"))):
            if getattr(self, field) not in known:
                raise ConfigError(
                    f"retrieval: {field} must be one of {', '.join(known)}, got {getattr(self, field)!r}."
                )
        if self.index == "ivf" and not 1 <= self.nprobe <= self.partitions:
            raise ConfigError(f"retrieval: nprobe must be from 1 to {self.partitions}, got {self.nprobe}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowProofEntry:
    """What the row proof found when the version was exported. It holds for exactly this graph, and this proof.

    Attributes:
        version: `tpuembed.row_proof.VERSION` of the proof.
        sha256: of saved_model.pb with mapped paths relative to the version's folder; see `relative_graph`.
        reasons: maps each signature to the reason why its requests may not share a run. Empty if they may.
    """

    version: int
    sha256: str
    reasons: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowStoreEntry:
    """Where the rows of a version are that has no tables: in the Redis that the server is given.

    Attributes:
        name: of the model there.
        arrays: maps each array of rows to the text in its rows' keys, a digest of the content. These arrays have no files.
    """

    name: str
    arrays: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlayEntry:
    """The rows of a stack that are not those of its base.

    Attributes:
        rows: stored rows, sorted by their number in the stack.
        words: int64; bit n % 32 of word n // 32 is set if row n is in `rows`. The upper half of a word, an int32, is one
            less than the number of bits that are set in all earlier words.
        crc32c: of all rows of the stack, in the bytes of a full export; None if it is not known.
    """

    rows: ArrayEntry
    words: ArrayEntry
    crc32c: int | None = None


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
        check_integers(self, version=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """The RowHistory of a table when it was exported."""

    spans: tuple[tuple[str, int], ...]
    updates: int

    def __post_init__(self) -> None:
        check_integers(self, updates=0)


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
        check_integers(self, rows=1, dim=1, offset=0, size=1, crc32c=0)
        if not _FILE_NAME.fullmatch(self.name):
            raise ConfigError(f"stack {self.name!r}: its name may have letters, digits, '_', '.' and '-' only.")
        check_inside(self.file)
        if self.base_file:
            check_inside(self.base_file)
        if self.storage not in STORAGES:
            raise ConfigError(f"stack {self.name!r}: unknown storage {self.storage!r}.")
        check_size(self.name, f"{self.storage} [{self.rows}, {self.dim}]", self.rows * self.row_bytes, self.size)
        if self.overlay is not None:
            rows, words, count = self.overlay.rows, self.overlay.words, -(-self.rows // 32)
            check_size(rows.name, f"{self.storage} [{rows.rows}, {self.dim}]", rows.rows * self.row_bytes, rows.size)
            check_size(words.name, f"int64 [{count}]", 8 * count, words.size)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one stored row."""
        return STORAGES[self.storage].row_bytes(self.dim)

    @property
    def arrays(self) -> tuple[ArrayEntry, ...]:
        """Return the arrays of the graph that hold its rows: that of `file` first."""
        own = ArrayEntry(
            name=self.name,
            key=self.key,
            rows=self.rows,
            file=self.file,
            offset=self.offset,
            size=self.size,
            crc32c=self.crc32c,
        )
        more = () if self.overlay is None else (self.overlay.rows, self.overlay.words)
        return own, *more


def check_integers(entry: Any, **minimums: int) -> None:
    """Raise ConfigError unless these fields of `entry` are integers of at least the given minimums."""
    kind, name = type(entry).__name__.removesuffix("Entry").lower(), getattr(entry, "name", None)
    for field, minimum in minimums.items():
        value = getattr(entry, field)
        if type(value) is not int or not minimum <= value < 2**63:
            what = kind if name is None else f"{kind} {name!r}"
            raise ConfigError(f"{what}: {field} must be an integer of at least {minimum}, got {value!r}.")


def check_inside(file: str) -> None:
    """Raise ConfigError unless `file` is a path to a file inside the version directory."""
    parts = PurePosixPath(file).parts
    if not parts or "/".join(parts) != file or ".." in parts or parts[0] == "/" or "\0" in file:
        raise ConfigError(f"file {file!r} is not a path inside the export.")


def check_size(name: str, what: str, needed: int, size: int) -> None:
    if size != needed:
        raise ConfigError(f"stack {name!r}: {what} takes {needed} bytes, not {size}.")
