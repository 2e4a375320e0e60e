"""Copies the rows of one table from a checkpoint into memory, piece by piece."""

from typing import Any, Final

import numpy as np

from tpuembed.backends.table_rows import PIECE_BYTES, initial_pieces, piece_rows, write_rows
from tpuembed.checkpoint import Checkpoint
from tpuembed.errors import CheckpointCorruptError, CheckpointMismatchError
from tpuembed.restore.plan import TablePlan
from tpuembed.row_stamps import RowStamps
from tpuembed.table_access import LiveTables, write_numbers
from tpuembed.tensor_bundle import crc

__all__ = ["is_checked_while_read", "restore_stamps", "restore_table"]

Array = np.ndarray[Any, Any]

_STAMPS: Final = PIECE_BYTES // 4


def is_checked_while_read(checkpoint: Checkpoint, plan: TablePlan, slot: str | None) -> bool:
    """Return True if `restore_table` reads everything that the checkpoint has a checksum of. If False, call `Checkpoint.verify`."""
    return not plan.skipped_rows and checkpoint.checksum(plan.source, slot) is not None


def restore_table(checkpoint: Checkpoint, live: LiveTables, plan: TablePlan, slots: bool) -> None:
    """Write the table, and its slots if `slots`, according to `plan`.

    Raises:
        CheckpointError: the rows cannot be read, or their checksum is wrong. The rows before them are already written.
    """
    state = live.state(plan.table)
    for slot in (None, *plan.slots):
        variable = live.variable(plan.table, slot)
        try:
            _stream(checkpoint, plan, slot, variable)
        except Exception as error:
            error.add_note(f"table {plan.table!r} of layer {live.layer!r} is partly restored. Restore it again.")
            raise
    for slot in (None, *(state.slots if slots else ())):
        for start, rows in initial_pieces(state, slot, plan.rows, plan.rows + plan.new_rows):
            write_rows(live.variable(plan.table, slot), start, rows)


def restore_stamps(checkpoint: Checkpoint, stamps: RowStamps, plan: TablePlan) -> None:
    """Write the stamps of a table that was restored. The layer's count of updates is restored already."""
    buffer = np.empty(min(_STAMPS, plan.rows), np.int32)
    for start in range(0, plan.rows, _STAMPS):
        piece = buffer[: plan.rows - start]
        checkpoint.read_stamps(plan.source, start, piece)
        stamps.write(plan.table, start, piece)
    if plan.new_rows:
        stamps.wrote(plan.table, plan.rows, plan.rows + plan.new_rows)


def _stream(checkpoint: Checkpoint, plan: TablePlan, slot: str | None, variable: Any) -> None:
    step = piece_rows(plan.dim)
    buffer = np.empty((min(step, plan.rows), plan.dim), plan.dtypes[slot])
    checksum = 0
    for start in range(0, plan.rows, step):
        piece = buffer[: plan.rows - start]
        checkpoint.read_into(plan.source, start, piece, slot)
        checksum = crc.extend(checksum, piece.reshape(-1).view(np.uint8))
        rows = _as_float32(checkpoint, plan, slot, piece)
        if plan.names is None:
            write_rows(variable, start, rows)
        else:
            numbers = plan.names.numbers[start : start + len(piece)]
            kept = np.flatnonzero(numbers >= 0)
            write_numbers(variable, numbers[kept], rows[kept])
    stated = checkpoint.checksum(plan.source, slot) if is_checked_while_read(checkpoint, plan, slot) else None
    if stated is not None and stated != checksum:
        what = f"table {plan.source!r}" if slot is None else f"table {plan.source!r}: slot {slot!r}"
        raise CheckpointCorruptError.of(
            f"checkpoint {checkpoint.path}: {what}: its index says CRC32C {stated:#010x}. The CRC32C of its bytes is "
            f"{checksum:#010x}"
        )


def _as_float32(checkpoint: Checkpoint, plan: TablePlan, slot: str | None, piece: Array) -> Array:
    try:
        with np.errstate(over="raise"):
            return piece.astype(np.float32, copy=False)
    except FloatingPointError:
        what = "a row" if slot is None else f"a row of slot {slot!r}"
        raise CheckpointMismatchError(
            f"checkpoint {checkpoint.path}: table {plan.source!r}: {what} has a number beyond the range of float32. "
            "Leave the table out."
        ) from None
