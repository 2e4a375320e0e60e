"""The content and origin of an export: the contract between exporter and server, free of TensorFlow.

The manifest is at `<version>/assets.extra/tpuembed.json`; TensorFlow Serving ignores that folder.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol, TypeVar

from tpuembed.errors import ConfigError, reason

__all__ = [
    "LAYOUTS",
    "LOOKUP_SCOPE",
    "MANIFEST_PATH",
    "STORAGE_TYPES",
    "FeatureEntry",
    "FileEntry",
    "Folder",
    "Manifest",
    "PackedInput",
    "PackedOutput",
    "Packing",
    "QuantizationEntry",
    "StackEntry",
    "TableEntry",
    "TensorSpec",
    "VocabularyEntry",
]

MANIFEST_PATH = Path("assets.extra") / "tpuembed.json"
LOOKUP_SCOPE: Final = "tpuembed_lookup"
"""The name scope of a lookup's operations in an export. The server treats the scope as one operation. Each row of its
outputs depends only on the ids of that row, and entries of -1 after a row's ids change nothing.
"""
FORMAT = 1
"""The format number. A new field that readers need raises it. Other new fields do not, because readers ignore unknown
fields.
"""
LAYOUTS: Final = ("variables", "mmap")
"""How a server gets the tables: loaded into variables, or mapped from their files."""

_ROW_BYTES: Final = {"float32": (4, 0), "bfloat16": (2, 0), "float16": (2, 0), "int8": (1, 8)}
"""Storage -> (bytes of an element, further bytes of a row: int8 has a float32 scale and centre in it)."""
STORAGE_TYPES: Final = tuple(_ROW_BYTES)
"""The types that tables can be stored as."""

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
        out_of_vocabulary: "error" if ids that are not rows fail the request; else any id is answered.
    """

    name: str
    table: str
    input: str
    weighted: bool
    max_sequence_length: int
    out_of_vocabulary: str | int


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
    """

    name: str
    rows: int
    dim: int
    dtype: str
    stack: str
    row_offset: int
    first_row: int = 0
    quantization: QuantizationEntry | None = None

    def __post_init__(self) -> None:
        _check_integers(self, rows=1, dim=1, row_offset=0, first_row=0)


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

    def __post_init__(self) -> None:
        _check_integers(self, rows=1, dim=1, offset=0, size=1, crc32c=0)
        _check_inside(self.file)
        if self.storage not in _ROW_BYTES:
            raise ConfigError(f"stack {self.name!r}: unknown storage {self.storage!r}.")
        element, more = _ROW_BYTES[self.storage]
        needed = self.rows * (self.dim * element + more)
        if self.size != needed:
            raise ConfigError(
                f"stack {self.name!r}: {self.storage} [{self.rows}, {self.dim}] takes {needed} bytes, not {self.size}."
            )


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

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ConfigError(f"its layout is {self.layout!r}, and this version reads {', '.join(LAYOUTS)}.")
        _check_stacks(self.stacks, mapped=self.layout == "mmap")
        _check_tables(self.tables, self.stacks)
        for file in self.files:
            _check_inside(file)

    def table_files(self) -> dict[str, int]:
        """Return the bytes of each data file of the stacks, by its path inside the version directory."""
        sizes: dict[str, int] = {}
        for stack in self.stacks:
            sizes[stack.file] = max(sizes.get(stack.file, 0), stack.offset + stack.size)
        return sizes

    def write(self, version_dir: Path) -> None:
        """Write the manifest into `version_dir`, and create its folder."""
        path = version_dir / MANIFEST_PATH
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)
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
        except (TypeError, AttributeError):
            fault = "a field has a value of another type"
        except (ValueError, RecursionError) as error:
            fault = reason(error).removesuffix(".")
        raise ConfigError(f"manifest {path}: not a tpuembed manifest: {fault}. Export again.")

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> "Manifest":
        if value["format"] != FORMAT:
            raise ValueError(f"its format is {value['format']!r}, and this version reads {FORMAT}")
        value["tables"] = tuple(_table(entry) for entry in value["tables"])
        value["stacks"] = tuple(_entry(StackEntry, entry) for entry in value["stacks"])
        value["files"] = {path: _entry(FileEntry, entry) for path, entry in value["files"].items()}
        value["features"] = tuple(_entry(FeatureEntry, entry) for entry in value.get("features", ()))
        value["vocabularies"] = tuple(_entry(VocabularyEntry, entry) for entry in value.get("vocabularies", ()))
        if "packing" in value:
            value["packing"] = _packing(value["packing"])
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


def _packing(value: Mapping[str, Any]) -> Packing:
    inputs = tuple(_entry(PackedInput, entry) for entry in value["inputs"])
    outputs = value["outputs"]
    if outputs is not None:
        outputs = tuple(_entry(PackedOutput, {**entry, "shape": tuple(entry["shape"])}) for entry in outputs)
    return Packing(inputs=inputs, outputs=outputs, left_out=value["left_out"])


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


def _check_stacks(stacks: Iterable[StackEntry], *, mapped: bool) -> None:
    _check_distinct("stack", [stack.name for stack in stacks])
    in_place = sorted(stacks, key=attrgetter("file", "offset"))
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
