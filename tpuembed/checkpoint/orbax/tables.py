"""Finds the arrays of an Orbax checkpoint that are tables and slots, opens them, and checks their shapes and layouts.

Source of the names: keras.Model.get_state_tree, keras/src/optimizers/base_optimizer.py (add_variable_from_reference);
keras_rs/src/layers/embedding/jax/distributed_embedding.py (`var:{stack}:table[:slot:{slot}]`);
jax_tpu_embedding/sparsecore/lib/nn/embedding.py (EmbeddingVariables: `table`, `slot`).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from tpuembed.checkpoint.bundle.rows import ModSharded
from tpuembed.checkpoint.bundle.sparsecore import TableLayout, check_stack
from tpuembed.checkpoint.orbax.arrays import ArrayStore, StoredArray
from tpuembed.checkpoint.orbax.metadata import Leaf
from tpuembed.checkpoint.orbax.stack_specs import HOW_TO_SAY, StackSpec, short_stack_name
from tpuembed.checkpoint.types import TableInfo, by_name
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointMismatchError, first_few
from tpuembed.formats.protobuf import MalformedError

__all__ = ["StoredTable", "open_tables"]

_PREFIX, _TABLE, _SLOT = "var:", ":table", ":table:slot:"


@dataclasses.dataclass(frozen=True)
class TableLeaves:
    """The leaves of a table or of a stack: its rows, and its slots by name."""

    name: str
    table: Leaf
    slots: Mapping[str, Leaf] = dataclasses.field(default_factory=dict)


def find_stacks(leaves: Sequence[Leaf], names: Iterable[str] = ()) -> list[TableLeaves]:
    """Return the stacks of keras-rs and of jax-tpu-embedding, and other leaves with one of `names`, which a spec has."""
    found: defaultdict[str, defaultdict[str | None, list[Leaf]]] = defaultdict(lambda: defaultdict(list))
    known = frozenset(names)
    children: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    for leaf in leaves:
        for depth in range(1, len(leaf.path)):
            children[leaf.path[:depth]].add(leaf.path[depth])
    # The paths that have exactly `table` and, of any form, `slot` under them.
    nodes = {path for path, below in children.items() if below == {"table", "slot"}}
    for leaf in leaves:
        role = _role(leaf, nodes, known)
        if role is not None and leaf.is_array:
            found[role[0]][role[1]].append(leaf)
    return [
        TableLeaves(
            name,
            _only(f"stack {name!r}", kept[None]),
            {
                slot: _only(f"slot {slot!r} of stack {name!r}", of_slot)
                for slot, of_slot in kept.items()
                if slot is not None
            },
        )
        for name, kept in sorted(found.items())
        if None in kept
    ]


def _only(what: str, found: Sequence[Leaf]) -> Leaf:
    if len(found) > 1:
        shown = " and ".join(leaf.shown for leaf in found[:3])
        raise CheckpointFormatError(
            f"checkpoint {found[0].item.folder}: {shown} are both {what}. Give the path of the item with the "
            "tables, or save them without the other."
        )
    return found[0]


def _role(leaf: Leaf, nodes: Collection[tuple[str, ...]], known: Collection[str]) -> tuple[str, str | None] | None:
    """Return the stack that a leaf belongs to, and the slot that it is; None for its rows."""
    path, name = leaf.path, leaf.path[-1]
    if name.startswith(_PREFIX) and name.endswith(_TABLE):  # keras-rs
        return name[len(_PREFIX) : -len(_TABLE)], None
    if name.startswith(_PREFIX) and _SLOT in name[len(_PREFIX) :]:
        stack, _, slot = name[len(_PREFIX) :].rpartition(_SLOT)
        return stack, slot
    if path[:-1] in nodes and name == "table":  # jax-tpu-embedding
        return path[-2], None
    for depth in range(1, len(path) - 1):
        if path[:depth] in nodes and path[depth] == "slot":
            return path[depth - 1], "/".join(path[depth + 1 :])
    if name in known:
        return name, None
    return (path[-2], None) if path[-2:-1] and path[-2] in known and name == "table" else None


def match_specs(where: str, stacks: Iterable[TableLeaves], specs: Sequence[StackSpec]) -> dict[str, StackSpec]:
    """Return the spec of each stack."""
    found = [stack.name for stack in stacks]
    if found and not specs:
        raise CheckpointFormatError(
            f"checkpoint {where}: its tables are stacked on SparseCores ({_shown(found)}), and it does not record "
            f"how. {HOW_TO_SAY}."
        )
    by_name = {spec.name if spec.name in found else short_stack_name(spec.name): spec for spec in specs}
    missing = sorted(set(found) ^ set(by_name))
    if missing:
        raise CheckpointMismatchError(
            f"checkpoint {where}: its stacks are {_shown(found)}, but those of the embedding spec are {_shown(by_name)}. "
            f"{missing[0]!r} is in only one of them. Give the spec that the model was trained with."
        )
    return by_name


def _shown(names: Iterable[str]) -> str:
    return first_few(sorted(names)) or "none"


def place_tables(where: str, spec: StackSpec, shape: tuple[int, int]) -> list[TableLayout]:
    """Return the places of the tables of a stack [rows, dim], checked against its shape."""
    rows, dim = shape
    cores = spec.num_sparsecores
    said = (spec.stack_vocab_size or rows, spec.stack_embedding_dim or dim)
    layouts = []
    try:
        if said != shape or rows % cores:
            raise MalformedError(f"its stack of {list(said)} does not fit {cores} SparseCores")
        for table in spec.tables:
            # A table takes the rows in its spec, or else the fewest possible; the rest is the stack's padding.
            padded_rows = table.padded_vocab_size or -(-table.vocab_size // cores) * cores
            layout = TableLayout(
                table=table.name,
                stack=spec.name,
                num_sparse_cores=cores,
                num_partitions=1,
                shard_rows=rows // cores,
                shape=(table.vocab_size, table.embedding_dim),
                padded_shape=(padded_rows, table.padded_embedding_dim or dim),
                offset=table.row_offset_in_shard,
                rotation=table.shard_rotation,
            )
            if layout.stack_shape != shape:
                raise MalformedError(f"the layout of table {table.name!r} has {layout.padded_shape[1]} columns")
            layouts.append(layout)
        check_stack(spec.name, layouts)
    except MalformedError as error:
        raise CheckpointMismatchError(
            f"checkpoint {where}: stack {spec.name!r} is {list(shape)}, which does not match the embedding spec: "
            f"{error}. Give the spec that the model was trained with."
        ) from None
    return layouts


_FLOATS: Final = frozenset({"float32", "float64", "float16", "bfloat16"})
_VARIABLES: Final = frozenset({"trainable_variables", "non_trainable_variables"})
_OPTIMIZERS: Final = "optimizer_variables"
_EMBEDDINGS: Final = "embeddings"
_CHANGED_BY: Final = ("lora_embeddings_a", "embeddings_scale")
"""Leaves beside `embeddings` that change the rows that the layer looks up."""
_SLOTS: Final = {
    "accumulator": "accumulators",
    "linear": "linears",
    "momentum": "momenta",
    "velocity": "velocities",
}
"""Slot names of Keras 3 and jax-tpu-embedding -> those of `tf.tpu.experimental.embedding`; others stay unchanged."""
_IN_ORDER: Final = ModSharded(1, 0, lambda parts: parts)
"""The place of rows that are stored in the order of their ids: all in one part."""
_OF_KERAS: Final[Mapping[str, frozenset[str]]] = {
    "adagrad": frozenset({"accumulator"}),
    "adam": frozenset({"momentum", "velocity"}),
    "adamw": frozenset({"momentum", "velocity"}),
    "ftrl": frozenset({"accumulator", "linear"}),
    "lamb": frozenset({"momentum", "velocity"}),
    "sgd": frozenset({"momentum"}),
}
"""Keras' optimizers by their default names -> their slots that TensorFlow also has. Other optimizers use the same names
for other quantities: RMSprop's velocity, Lion's momentum.
"""


def _keras_tables(leaves: Sequence[Leaf]) -> Iterator[TableLeaves]:
    """Yield the embedding layers of keras-rs and Keras, by their table's name, with their slots in optimizers."""
    variables = [leaf for leaf in leaves if leaf.path[0] in _VARIABLES]
    paths = {leaf.path for leaf in variables}
    kept = _optimizer_slots([leaf for leaf in leaves if leaf.path[0] == _OPTIMIZERS], variables)
    for leaf in variables:
        if leaf.path[-1] != _EMBEDDINGS or len(leaf.path) < 3:
            continue
        for name in _CHANGED_BY:
            if (*leaf.path[:-1], name) in paths:
                raise CheckpointFormatError(
                    f"checkpoint {leaf.item.folder}: table {leaf.shown} has {name!r} beside it, which changes the "
                    "rows that the layer looks up. Merge it into the table and save again."
                )
        yield TableLeaves(leaf.path[-2], leaf, kept.get(leaf.path, {}))


def _optimizer_slots(leaves: Iterable[Leaf], variables: Iterable[Leaf]) -> dict[tuple[str, ...], dict[str, Leaf]]:
    """Return the slots by the path of their variable. They are named after that path, joined by "_", and the slot."""
    prefixes: defaultdict[str, list[Leaf]] = defaultdict(list)
    for variable in variables:
        prefixes["_".join(variable.path[1:])].append(variable)
    kept: defaultdict[tuple[str, ...], dict[str, Leaf]] = defaultdict(dict)
    for leaf in leaves:
        words = leaf.path[-1].split("_")
        # The longest name of a variable before a "_".
        ends = range(len(words) - 1, 0, -1)
        prefix = next((start for end in ends if (start := "_".join(words[:end])) in prefixes), None)
        if prefix is None:
            continue
        optimizer, name = leaf.path[1].rstrip("0123456789").removesuffix("_"), leaf.path[-1][len(prefix) + 1 :]
        name = _SLOTS.get(name, name) if name in _OF_KERAS.get(optimizer, ()) else name
        if len(prefixes[prefix]) > 1:
            one, other = prefixes[prefix][:2]
            raise CheckpointFormatError(
                f"checkpoint {leaf.item.folder}: {leaf.shown} may be {name!r} of {one.shown} or of {other.shown}. Rename one "
                "and save again."
            )
        variable = prefixes[prefix][0]
        if (other := kept[variable.path].setdefault(name, leaf)) is not leaf:
            raise CheckpointFormatError(
                f"checkpoint {leaf.item.folder}: {other.shown} and {leaf.shown} are both {name!r} of "
                f"{variable.shown}. Save again with one optimizer."
            )
    return kept


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """A table: its description, the arrays of its rows (None) and slots, and the place of its rows in them."""

    info: TableInfo
    arrays: Mapping[str | None, StoredArray]
    place: ModSharded = _IN_ORDER

    @property
    def name(self) -> str:
        """Return its name."""
        return self.info.name


def open_tables(
    where: str, leaves: Sequence[Leaf], specs: Sequence[StackSpec], store: ArrayStore
) -> dict[str, StoredTable]:
    """Return all tables by name: stacks and embedding layers, or else all matrices of floats.

    `specs` say how tables are stacked; () if that is not known.
    """
    stacks = find_stacks(leaves, [spec.name for spec in specs])
    specs_by_name = match_specs(where, stacks, specs)
    found = [table for stack in stacks for table in _stacked_tables(where, stack, specs_by_name[stack.name], store)]
    found += [_dense_table(layer, store) for layer in _by_name(_keras_tables(leaves))]
    if not found:
        several_items = len({leaf.item for leaf in leaves}) > 1
        plain = [
            TableLeaves("/".join((leaf.item.folder.name, *leaf.path) if several_items else leaf.path), leaf)
            for leaf in leaves
            if leaf.is_array and leaf.rank in {None, 2}
        ]
        for table in _by_name(plain):
            if _is_matrix(array := store.open(table.table)):
                array.check_stored()
                found.append(_row_by_row(table.name, {None: array}))
    if not found:
        raise CheckpointFormatError(
            f"checkpoint {where}: has no table, neither an embedding layer's nor an array that is a matrix of "
            f"floats, among {len(leaves)} leaves. Check that the layer was built before the checkpoint was saved."
        )
    return by_name(
        found,
        lambda one, _: (
            f"checkpoint {where}: has two tables {one.name!r}, one of them stacked. Rename one and save again."
        ),
    )


def _by_name(tables: Iterable[TableLeaves]) -> Iterable[TableLeaves]:
    return by_name(
        tables,
        lambda one, other: (
            f"checkpoint {other.table.item.folder}: arrays {one.table.shown} and {other.table.shown} are both "
            f"table {one.name!r}. Rename one and save again."
        ),
    ).values()


def _stacked_tables(where: str, stack: TableLeaves, spec: StackSpec, store: ArrayStore) -> Iterator[StoredTable]:
    arrays: dict[str | None, StoredArray] = {None: _open_matrix(stack.table, store)}
    rows, dim = arrays[None].shape
    for name, leaf in stack.slots.items():
        slot = _SLOTS.get(name, name)
        if slot in arrays:
            raise CheckpointFormatError(
                f"checkpoint {where}: stack {stack.name!r} has two slots {slot!r}, one of them called "
                f"{name!r}. Save it without the other."
            )
        arrays[slot] = _open_slot(stack.table, (rows, dim), leaf, store)
    for layout in place_tables(where, spec, (rows, dim)):
        info = TableInfo(layout.table, *layout.shape, arrays[None].dtype, _names(arrays), layout.words)
        yield StoredTable(info, arrays, layout.rows)


def _dense_table(layer: TableLeaves, store: ArrayStore) -> StoredTable:
    arrays: dict[str | None, StoredArray] = {None: _open_matrix(layer.table, store)}
    for name, leaf in layer.slots.items():
        if name in _SLOTS.values():  # these have a value per element of the table; others may have any shape
            arrays[name] = _open_slot(layer.table, arrays[None].shape, leaf, store)
        elif leaf.rank in {None, 2} and (slot := store.open(leaf)).shape == arrays[None].shape and _is_matrix(slot):
            arrays[name] = slot
    return _row_by_row(layer.name, arrays)


def _row_by_row(name: str, arrays: Mapping[str | None, StoredArray]) -> StoredTable:
    table = arrays[None]
    rows, dim = table.shape
    layout = f"chunks of {min(table.chunk[0], rows)} rows" if rows else ""
    return StoredTable(TableInfo(name, rows, dim, table.dtype, _names(arrays), layout), arrays)


def _names(arrays: Mapping[str | None, StoredArray]) -> tuple[str, ...]:
    return tuple(sorted(name for name in arrays if name is not None))


def _is_matrix(array: StoredArray) -> bool:
    return len(array.shape) == 2 and array.dtype.name in _FLOATS


def _open_matrix(leaf: Leaf, store: ArrayStore) -> StoredArray:
    array = store.open(leaf)
    if not _is_matrix(array):
        raise CheckpointMismatchError(
            f"checkpoint {leaf.item.folder}: table {leaf.shown} should be a matrix of floats, but is "
            f"{array.dtype.name} {list(array.shape)}. Save the table as it was trained."
        )
    array.check_stored()
    return array


def _open_slot(table: Leaf, shape: tuple[int, ...], leaf: Leaf, store: ArrayStore) -> StoredArray:
    slot = _open_matrix(leaf, store)
    if slot.shape != shape:
        raise CheckpointCorruptError.of(
            f"checkpoint {leaf.item.folder}: table {table.shown} is {list(shape)}, but its slot {leaf.shown} is "
            f"{list(slot.shape)}"
        )
    return slot
