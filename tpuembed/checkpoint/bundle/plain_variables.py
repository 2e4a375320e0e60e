"""Tables of checkpoints without an embedding layer: every matrix of floats.

A partitioner of TensorFlow 1 cuts a variable into parts. The checkpoint does not record how `tf.nn.embedding_lookup` assigned
ids to them: "mod" assigns ids round-robin, "div" gives each part a run of them.

Source: embedding_lookup in tensorflow/python/ops/embedding_ops.py; _iter_slices in tensorflow/python/ops/variable_scope.py.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from tpuembed.checkpoint.bundle.object_graph import ObjectGraph
from tpuembed.checkpoint.bundle.rows import DENSE, ModSharded, RowLayout
from tpuembed.checkpoint.bundle.table_keys import TableKeys, is_table, optimizer_slots
from tpuembed.errors import CheckpointFormatError
from tpuembed.formats.tensor_bundle import Bundle, Entry

__all__ = ["PARTITION_STRATEGIES", "graph_variables", "named_variables"]

PARTITION_STRATEGIES: Final = ("mod", "div")
_OPTIMIZERS: Final = {
    "Adagrad": ("accumulators",),
    "Adam": ("momenta", "velocities"),
    "Ftrl": ("accumulators", "linears"),
    "Momentum": ("momenta",),
}
"""TensorFlow 1's optimizers by their default names -> the slots that they keep, in order of creation."""


def graph_variables(bundle: Bundle, graph: ObjectGraph) -> Iterator[TableKeys]:
    """Yield the matrices of floats of a TensorFlow 2 checkpoint by object path, with their slots in Keras optimizers."""
    for number in (0, *graph.parents):
        key = graph.nodes[number].value_key
        if (
            key is not None
            and key in bundle.entries
            and number not in graph.optimizer_variables
            and is_table(bundle.entries[key])
        ):
            yield TableKeys(graph.path(number), key, optimizer_slots(bundle, graph, number))


def named_variables(bundle: Bundle, strategy: str | None) -> Iterator[TableKeys]:
    """Yield the matrices of floats of a TensorFlow 1 checkpoint by variable name, with the slots that are proven.

    A tensor with holes is left out. TensorFlow 1 writes such for a partitioned variable's slots, if the optimizer was
    created in a variable_scope; see `Entry.holes`.

    `strategy`, "mod" or "div", assigned ids to the parts of partitioned variables; None if the user did not state it.
    """
    matrices = {name: entry for name, entry in bundle.entries.items() if is_table(entry) and not entry.holes}
    slots = _slots_by_name(matrices)
    held = {key for of_table in slots.values() for key in of_table.values()}
    for name in matrices:
        if name not in held:
            yield TableKeys(name, name, slots.get(name, {}), rows=_partitioned_rows(bundle, name, strategy))


def _slots_by_name(matrices: Mapping[str, Entry]) -> dict[str, dict[str, str]]:
    """Return {variable: {slot: its key}} for TensorFlow 1's optimizers with their default names.

    A slot's variable is called `SCOPE/VARIABLE/OPTIMIZER`, then `..._1`. SCOPE is the scope that the optimizer was
    created in, or missing. A slot is proven if exactly the numbers of one optimizer exist, if its pieces are those of
    the variable, and if just one optimizer and one variable match. Source: slot_creator.py, optimizer.py, adam.py,
    ftrl.py in tensorflow/python/training.
    """
    found: dict[str, list[dict[str, str]]] = {}
    for optimizer, slots in _OPTIMIZERS.items():
        for key in matrices:
            if not key.endswith(f"/{optimizer}"):
                continue
            keys = [key, *(f"{key}_{number}" for number in range(1, len(slots)))]
            parts = key.split("/")[:-1]  # VARIABLE of SCOPE/VARIABLE for any scope, or with none
            variables = [name for start in range(len(parts)) if (name := "/".join(parts[start:])) in matrices]
            if len(variables) != 1 or f"{key}_{len(slots)}" in matrices:
                continue
            if all(_pieces(matrices.get(one)) == _pieces(matrices[variables[0]]) for one in keys):
                found.setdefault(variables[0], []).append(dict(zip(slots, keys, strict=True)))
    return {variable: of_one[0] for variable, of_one in found.items() if len(of_one) == 1}


def _pieces(entry: Entry | None) -> object:
    """Return shape, dtype and cuts of a tensor: equal for a variable and its slots."""
    return entry and (entry.shape, entry.dtype, [(piece.start, piece.shape) for piece in entry.slices])


def _partitioned_rows(bundle: Bundle, name: str, strategy: str | None) -> RowLayout:
    """Return the order of rows in variable `name` of a TensorFlow 1 checkpoint."""
    entry = bundle.entries[name]
    if len({piece.start[0] for piece in entry.slices}) < 2:  # in one piece, or cut by columns
        return DENSE
    rows, count = entry.shape[0], len(entry.slices)
    # A partitioner makes parts of whole rows, evenly divided, with the first parts one row longer.
    starts = tuple(rows // count * part + min(part, rows % count) for part in range(count))
    parts = sorted((piece.start[0], *piece.shape) for piece in entry.slices)
    expected = [(start, stop - start, entry.shape[1]) for start, stop in zip(starts, (*starts[1:], rows), strict=True)]
    if parts != expected:
        raise CheckpointFormatError(
            f"checkpoint {bundle.prefix}: variable {name!r} of {rows} rows is cut in {count} parts of "
            f"{', '.join(str(part[1]) for part in parts[:8])} rows, which no partitioner of TensorFlow makes. "
            "Save it in one piece."
        )
    if strategy is None:
        raise CheckpointFormatError(
            f"checkpoint {bundle.prefix}: variable {name!r} is partitioned in {count}, and the checkpoint "
            "does not record how ids were assigned to the parts (div or mod). Give partition_strategy, the one "
            "that the model gave to tf.nn.embedding_lookup (its default is mod)."
        )
    mod_sharding = ModSharded(count, entry.shape[1], np.array(starts).__getitem__) if strategy == "mod" else None
    return RowLayout("partitioned", f"partitions, {strategy}", mod_sharding)
