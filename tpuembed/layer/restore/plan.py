"""The plan of a restore: data made from metadata alone. It reports every mismatch before a row is written."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from tpuembed.backends.table_state import TableState
from tpuembed.checkpoint import Checkpoint, TableInfo
from tpuembed.config import FTRL
from tpuembed.config.checks import check_choice, did_you_mean
from tpuembed.errors import CheckpointMismatchError, ConfigError, UnknownTableError, first_few, warn
from tpuembed.layer.restore.names import NamesPlan, plan_names
from tpuembed.layer.tables import LiveTables
from tpuembed.vocabulary import Vocabulary

__all__ = ["RestoreRequest", "TablePlan", "plan_tables"]

_GROW, _SHRINK = "grow", "shrink"
_EXACT: Final = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class RestoreRequest:
    """The arguments of a restore.

    Attributes:
        tables: {the layer's name: the checkpoint's}. None restores all tables, which must have the same names.
        slots: True restores the optimizers' slots too.
        resize: {the layer's name: "grow" or "shrink"}.
        lossy: True rounds float64 to float32.
        rows_only: True restores a table without slots if the layer or the checkpoint has none.
        by_name: True restores rows to the numbers of their names.
        any_size: True lets tables that are restored by name have different numbers of rows.
    """

    tables: Mapping[str, str] | None
    slots: bool
    resize: Mapping[str, str]
    lossy: bool
    rows_only: bool = False
    by_name: bool = False
    any_size: bool = False

    @classmethod
    def of(
        cls,
        tables: Iterable[str] | Mapping[str, str] | None,
        slots: bool,
        resize: Mapping[str, str] | bool | None,
        lossy: bool,
        by: str,
    ) -> "RestoreRequest":
        """Return the arguments in one form.

        Raises:
            ConfigError: an argument is of the wrong kind.
        """
        for name, value in (("slots", slots), ("lossy", lossy)):
            if not isinstance(value, bool):
                raise ConfigError(f"restore_tables: {name} must be True or False, got {value!r}.")
        if isinstance(tables, str):
            raise ConfigError(
                f"restore_tables: tables must be a list of names or a mapping, got {tables!r}. Write [{tables!r}]."
            )
        check_choice("restore_tables: by", by, ("number", "name"))
        if by == "name" and resize is not None and not isinstance(resize, bool):
            raise ConfigError(f"restore_tables: resize must be True or left out with by='name', got {resize!r}.")
        any_size = by == "name" and resize is True
        resize = None if by == "name" else resize
        if resize is not None and not isinstance(resize, Mapping):
            raise ConfigError(f"restore_tables: resize must be a mapping such as {{'videos': 'grow'}}, got {resize!r}.")
        if tables is not None:
            tables = dict(tables if isinstance(tables, Mapping) else ((name, name) for name in tables))
        if tables == {}:
            raise ConfigError("restore_tables: tables is empty. Name at least one, or leave it out to restore all.")
        return cls(tables, slots, dict(resize or {}), lossy, by_name=by == "name", any_size=any_size)


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """The plan of one table.

    Attributes:
        table: its name in the layer.
        source: its name in the checkpoint.
        rows: the number of the checkpoint's first rows that are read.
        new_rows: the number of rows after these that get initial values.
        skipped_rows: the number of the checkpoint's last rows that are omitted.
        dim: columns.
        slots: the slots that are restored beside the rows.
        dtypes: the dtypes on disk, of the rows (key None) and of each slot.
        names: what happens to each name, and the new number of each row. None if rows keep their numbers.
    """

    table: str
    source: str
    rows: int
    new_rows: int
    skipped_rows: int
    dim: int
    slots: tuple[str, ...]
    dtypes: Mapping[str | None, np.dtype[Any]]
    names: NamesPlan | None = None


def plan_tables(
    checkpoint: Checkpoint, live: LiveTables, request: RestoreRequest, vocabularies: Mapping[str, Vocabulary]
) -> list[TablePlan]:
    """Return the plan of every table of `request`. `vocabularies` are those of the layer's tables, by table.

    Raises:
        UnknownTableError: `tables` or `resize` name a table that the layer or the checkpoint does not have.
        CheckpointMismatchError: checkpoint and layer differ, and `request` does not allow it.
        ConfigError: `resize` names a table that is not restored, or a value of it is not grow or shrink.
    """
    infos = checkpoint.tables()
    pairs = request.tables
    if pairs is None:
        _check_same_tables(checkpoint, infos, live)
        pairs = {table: table for table in live.states}
    for table, source in pairs.items():
        live.state(table)
        if source not in infos:
            raise UnknownTableError(
                f"checkpoint {checkpoint.path}: has no table {source!r} for the layer's table {table!r}; "
                f"{did_you_mean(str(source), infos)}"
            )
    for table, how in request.resize.items():
        live.state(table)
        if table not in pairs:
            raise ConfigError(
                f"restore_tables: resize names table {table!r}, which is not restored (tables={sorted(pairs)}). Leave it out."
            )
        if how not in (_GROW, _SHRINK):
            raise ConfigError(f"restore_tables: resize[{table!r}] must be 'grow' or 'shrink', got {how!r}.")
    names = plan_names(checkpoint, live.layer, pairs, vocabularies) if request.by_name else {}
    return [
        _plan_table(checkpoint, infos[source], live, table, request, names.get(table))
        for table, source in pairs.items()
    ]


def _check_same_tables(checkpoint: Checkpoint, infos: Mapping[str, TableInfo], live: LiveTables) -> None:
    missing, extra = sorted(live.states.keys() - infos.keys()), sorted(infos.keys() - live.states.keys())
    if missing:
        raise CheckpointMismatchError(
            f"checkpoint {checkpoint.path}: has no table {_shown(missing)} of layer {live.layer!r}. It has "
            f"{_shown(infos)}. Name the tables to restore, tables=[...], or map the names, "
            f"tables={{{missing[0]!r}: <the checkpoint's name>}}."
        )
    if extra:
        raise CheckpointMismatchError(
            f"checkpoint {checkpoint.path}: has {_shown(extra)}, which layer {live.layer!r} does not have. The layer has "
            f"{_shown(live.states)}. Name the tables to restore, tables=[...]."
        )


def _plan_table(
    checkpoint: Checkpoint,
    info: TableInfo,
    live: LiveTables,
    table: str,
    request: RestoreRequest,
    names: NamesPlan | None,
) -> TablePlan:
    state = live.state(table)
    where = f"checkpoint {checkpoint.path}: table {info.name!r}"
    _check_shape(where, info, live.layer, state, request, names)
    slots = _checked_slots(checkpoint, where, info, live.layer, state, request.rows_only) if request.slots else ()
    dtypes = {slot: checkpoint.read(info.name, 0, 0, slot).dtype for slot in (None, *slots)}
    for slot, dtype in dtypes.items():
        if dtype.name not in _EXACT and not request.lossy:
            what = where if slot is None else f"{where}: slot {slot!r}"
            raise CheckpointMismatchError(
                f"{what} is {dtype.name}. Layer {live.layer!r} holds float32, which would round it. Pass lossy=True to round."
            )
    own_rows = info.rows if names is not None else state.config.vocabulary_size
    rows = min(info.rows, own_rows)
    return TablePlan(table, info.name, rows, own_rows - rows, info.rows - rows, info.dim, slots, dtypes, names)


def _check_shape(
    where: str, info: TableInfo, layer: str, state: TableState, request: RestoreRequest, names: NamesPlan | None
) -> None:
    rows, dim, table = state.config.vocabulary_size, state.config.dim, state.config.name
    if info.dim != dim:
        raise CheckpointMismatchError(
            f"{where} has rows of {info.dim} columns. Table {table!r} of layer {layer!r} has {dim}. Build the layer "
            f"with dim={info.dim}."
        )
    needed = None if info.rows == rows else _GROW if info.rows < rows else _SHRINK
    resize = request.resize.get(table)
    if needed is None or resize == needed or (names is not None and request.any_size):
        return
    if request.by_name:
        remedy = "restore the table by number in a separate call" if names is None else "pass resize=True"
        raise CheckpointMismatchError(
            f"{where} has {info.rows} rows. Table {table!r} of layer {layer!r} has {rows}. Build the layer with "
            f"vocabulary_size={info.rows}, or {remedy}."
        )
    asked = "" if resize is None else f" resize says {resize!r}."
    meaning = f"initialize rows {info.rows} to {rows - 1}" if needed == _GROW else f"drop its rows from {rows} on"
    raise CheckpointMismatchError(
        f"{where} has {info.rows} rows. Table {table!r} of layer {layer!r} has {rows}.{asked} Build the layer with "
        f"vocabulary_size={info.rows}, or pass resize={{{table!r}: {needed!r}}} to {meaning}."
    )


def _checked_slots(
    checkpoint: Checkpoint, where: str, info: TableInfo, layer: str, state: TableState, rows_only: bool
) -> tuple[str, ...]:
    if rows_only and not (info.slots and state.slots):
        if state.slots:
            warn(
                f"{where} has no slots. The slots of table {state.config.name!r} of layer {layer!r} "
                f"({_shown(state.slots)}) are not changed.",
            )
        return ()
    if set(info.slots) != set(state.slots):
        kind = "optimizer=None" if state.optimizer is None else state.optimizer.kind
        raise CheckpointMismatchError(
            f"{where} has {_slots_of(info.slots)}. Table {state.config.name!r} of layer {layer!r} ({kind}) has "
            f"{_slots_of(state.slots)}. Build the layer with the optimizer that trained it, or pass slots=False to restore "
            "the rows only."
        )
    saved = (checkpoint.layer_config or {}).get("tables", {}).get(info.name, {}).get("optimizer")
    if isinstance(state.optimizer, FTRL) and isinstance(saved, Mapping) and saved.get("kind") == FTRL.kind:
        option = "multiply_linear_by_learning_rate"
        in_checkpoint, in_layer = saved.get(option, False), state.optimizer.multiply_linear_by_learning_rate
        if in_checkpoint != in_layer:
            raise CheckpointMismatchError(
                f"{where} was trained by FTRL with {option}={in_checkpoint}. Table {state.config.name!r} of layer {layer!r} has "
                f"{option}={in_layer}, so its linears have another scale. Build the layer with {option}={in_checkpoint}, or "
                "pass slots=False."
            )
    return tuple(state.slots)


def _slots_of(slots: Iterable[str]) -> str:
    return f"slots {_shown(slots)}" if slots else "no slots"


def _shown(names: Iterable[str]) -> str:
    return first_few(map(repr, sorted(names)), 8)
