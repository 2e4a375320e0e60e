"""How tables are stacked on SparseCores, as recorded in the checkpoint or given by the user.

jax-tpu-embedding records it in an EmbeddingSpecProto (jax_tpu_embedding/sparsecore/lib/proto/embedding_spec.proto),
which its examples save as an item of the checkpoint. keras-rs does not record it, so the user gives it: as such a proto
in text form, or as a mapping or JSON file

    {STACK: {"num_sparsecores": N, "tables": {TABLE: {"vocab_size": V, "embedding_dim": D,
        "row_offset_in_shard": O, "shard_rotation": R}}}}
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tpuembed.config.checks import check_count, check_keys
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, ConfigError, MissingExtraError, reason
from tpuembed.files import FilePath, UrlPath, as_path, open_stream
from tpuembed.formats.protobuf import MalformedError
from tpuembed.formats.protobuf_text import message_class, parse_text

__all__ = ["HOW_TO_SAY", "StackSpec", "TableSpec", "given_specs", "saved_specs", "short_stack_name", "to_mapping"]

HOW_TO_SAY: Final = (
    'Give embedding_spec=FILE: the text of jax_tpu_embedding\'s create_proto_from_feature_specs(...), or JSON {"STACK": '
    '{"num_sparsecores": N, "tables": {"TABLE": {"vocab_size": V, "embedding_dim": D, "row_offset_in_shard": O, '
    '"shard_rotation": R}}}}'
)
_MAX_BYTES: Final = 2 << 20
_MAX_LINE: Final = 32 << 10
"""Protobuf's parser takes time that is quadratic in the length of a line. With these limits a hostile file takes half a minute."""


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """One table of a stack, by the names of TableSpecProto. A missing number is 0."""

    name: str
    vocab_size: int
    embedding_dim: int
    row_offset_in_shard: int = 0
    shard_rotation: int = 0
    padded_vocab_size: int = 0
    padded_embedding_dim: int = 0


@dataclasses.dataclass(frozen=True)
class StackSpec:
    """One stack, by the names of StackedTableSpecProto. A missing number is 0."""

    name: str
    num_sparsecores: int
    tables: tuple[TableSpec, ...]
    stack_vocab_size: int = 0
    stack_embedding_dim: int = 0


_STACK_NUMBERS: Final = ("stack_vocab_size", "stack_embedding_dim", "num_sparsecores")
_TABLE_NUMBERS: Final = tuple(field.name for field in dataclasses.fields(TableSpec) if field.name != "name")
_MESSAGES: Final = {
    "EmbeddingSpecProto": {"stacked_table_specs": "repeated StackedTableSpecProto"},
    "StackedTableSpecProto": {
        "stack_name": "string",
        "table_specs": "repeated TableSpecProto",
        **dict.fromkeys(_STACK_NUMBERS, "int64"),
    },
    "TableSpecProto": {"table_name": "string", **dict.fromkeys(_TABLE_NUMBERS, "int64")},
}
"""The fields that matter."""


def saved_specs(protos: Iterable[FilePath]) -> tuple[StackSpec, ...]:
    """Return the specs in the checkpoint's only EmbeddingSpecProto, or () if it has none."""
    found = {}
    for path in protos:
        try:
            message = _parse(_read(path))
            if message.stacked_table_specs:
                found[path] = _from_proto(message)
        except (MalformedError, ConfigError) as error:
            raise CheckpointCorruptError.of(f"file {path}: {error}") from None
    if len(found) > 1:
        shown = " and ".join(str(path) for path in found)
        raise CheckpointFormatError(f"checkpoint files {shown} both describe how tables are stacked. {HOW_TO_SAY}.")
    return next(iter(found.values()), ())


def given_specs(value: Any) -> tuple[StackSpec, ...]:
    """Return the specs that the user gives as a mapping or the path of a file.

    Raises:
        ConfigError: the file cannot be read, or does not have the form in the module's docstring.
    """
    if isinstance(value, Mapping):
        return _from_mapping("embedding_spec", value)
    if not isinstance(value, str | Path | UrlPath):
        raise ConfigError(f"embedding_spec must be a mapping or the path of a file, got {value!r}.")
    where = f"embedding_spec {value}"
    try:
        text = _read(as_path(value))
        if text.lstrip().startswith("{"):
            return _from_mapping(where, json.loads(text))
        return _from_proto(_parse(text))
    except ConfigError:
        raise
    except (MalformedError, OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {reason(error)}. {HOW_TO_SAY}.") from None


def to_mapping(specs: Iterable[StackSpec]) -> dict[str, Any]:
    """Return the mapping that `given_specs` turns into `specs` again."""
    mapping: dict[str, Any] = {}
    for spec in specs:
        tables = {table.name: _numbers(table, _TABLE_NUMBERS) for table in spec.tables}
        mapping[spec.name] = {**_numbers(spec, _STACK_NUMBERS), "tables": tables}
    return mapping


def short_stack_name(name: str) -> str:
    """Return jax-tpu-embedding's name of a stack whose tables' names, joined by "_", are `name`.

    Source: jax_tpu_embedding/sparsecore/lib/nn/table_stacking.py (_get_stack_name).
    """
    return name if len(name) <= 50 else f"{name[:50]}...{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def _read(path: FilePath) -> str:
    with open_stream(path) as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise MalformedError(f"is over {_MAX_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise MalformedError("is not UTF-8") from None


def _from_mapping(where: str, stacks: Any) -> tuple[StackSpec, ...]:
    """Return the specs in a mapping of the module's form. It may also have the proto's other fields."""
    specs = []
    _check_mapping(where, stacks)
    for name, stack in stacks.items():
        inside = f"{where}: stack {name!r}"
        counts = _counts(inside, stack, _STACK_NUMBERS, ("num_sparsecores",), ("tables",))
        _check_mapping(f"{inside}: tables", stack.get("tables"))
        tables = tuple(
            TableSpec(table, **_counts(f"{inside}: table {table!r}", numbers, _TABLE_NUMBERS, _TABLE_NUMBERS[:2]))
            for table, numbers in stack["tables"].items()
        )
        specs.append(StackSpec(name, tables=tables, **counts))
    _check_apart(where, "tables", [table.name for spec in specs for table in spec.tables])
    return tuple(specs)


def _counts(
    where: str, values: Any, names: Sequence[str], required: Sequence[str], others: Sequence[str] = ()
) -> dict[str, int]:
    _check_mapping(where, values)
    check_keys(where, values, (*names, *others))
    counts = {name: values.get(name, 0) for name in names}
    for name, value in counts.items():
        check_count(f"{where}: {name}", value, 1 if name in required else 0)
    return counts


def _check_mapping(where: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) and key for key in value):
        raise ConfigError(f"{where} must be a mapping by name, got {str(value)[:100]}.")


def _parse(text: str) -> Any:
    """Return the EmbeddingSpecProto in `text`. Other fields than those in `_MESSAGES` are skipped."""
    longest = max(map(len, text.split("\n")))
    if longest > _MAX_LINE:
        raise MalformedError(
            f"has a line of {longest} characters, more than {_MAX_LINE}. Print it with a field on each line"
        )
    try:
        message = message_class("EmbeddingSpecProto", _MESSAGES)()
    except ImportError:
        raise MissingExtraError("reading an embedding spec in text form", "protobuf", "jax") from None
    return parse_text(text, message, allow_unknown=True)


def _from_proto(message: Any) -> tuple[StackSpec, ...]:
    if not message.stacked_table_specs:
        raise MalformedError("has no stacked_table_specs")
    stacks, where = {}, "embedding spec"
    _check_apart(where, "stacks", [stack.stack_name for stack in message.stacked_table_specs])
    for stack in message.stacked_table_specs:
        if not stack.stack_name or not stack.table_specs or not all(table.table_name for table in stack.table_specs):
            raise MalformedError("a stack needs a stack_name, and table_specs that all have a table_name")
        _check_apart(where, "tables", [table.table_name for table in stack.table_specs])
        tables = {table.table_name: _numbers(table, _TABLE_NUMBERS) for table in stack.table_specs}
        stacks[stack.stack_name] = {**_numbers(stack, _STACK_NUMBERS), "tables": tables}
    return _from_mapping(where, stacks)


def _numbers(message: Any, names: Sequence[str]) -> dict[str, int]:
    """Return the numbers of a spec, or of its proto, that are not missing."""
    return {name: number for name in names if (number := getattr(message, name))}


def _check_apart(where: str, kind: str, names: Iterable[str]) -> None:
    """Raise ConfigError if two stacks or two tables have the same name."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ConfigError(f"{where}: two {kind} are called {twice[0]!r}. Rename one.")
