"""Tables in stacks on SparseCores: finds the leaves that are stacks, and a table's rows in them.

Source: keras_rs/src/layers/embedding/jax/distributed_embedding.py (`var:{stack}:table[:slot:{slot}]`),
jax_tpu_embedding/sparsecore/lib/nn/embedding.py (EmbeddingVariables: `table`, `slot`).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tpuembed.checkpoint.bundle.sparsecore import TableLayout, check_stack
from tpuembed.checkpoint.orbax.metadata import Leaf
from tpuembed.checkpoint.orbax.stack_specs import HOW_TO_SAY, StackSpec, short_stack_name
from tpuembed.errors import CheckpointFormatError, CheckpointMismatchError, first_few
from tpuembed.formats.protobuf import MalformedError

__all__ = ["TableLeaves", "find_stacks", "match_specs", "place_tables"]

_PREFIX, _TABLE, _SLOT = "var:", ":table", ":table:slot:"


@dataclasses.dataclass(frozen=True)
class TableLeaves:
    """The leaves of a table or of a stack: its rows, and its slots by name."""

    name: str
    table: Leaf
    slots: Mapping[str, Leaf] = dataclasses.field(default_factory=dict)


def find_stacks(leaves: Sequence[Leaf], names: Iterable[str] = ()) -> list[TableLeaves]:
    """Return the stacks of keras-rs and of jax-tpu-embedding, and other leaves with one of `names`, which a spec has.

    Raises:
        CheckpointFormatError: two stacks have the same name.
    """
    found: defaultdict[str, defaultdict[str | None, list[Leaf]]] = defaultdict(lambda: defaultdict(list))
    known = frozenset(names)
    nodes = _variables(leaves)
    for leaf in leaves:
        role = _keras_rs_role(leaf) or _variables_role(leaf, nodes) or _known_role(leaf, known)
        if role is not None and leaf.is_array:
            stack, slot = role
            found[stack][slot].append(leaf)
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


def _keras_rs_role(leaf: Leaf) -> tuple[str, str | None] | None:
    name = leaf.path[-1]
    if not name.startswith(_PREFIX):
        return None
    if name.endswith(_TABLE):
        return name[len(_PREFIX) : -len(_TABLE)], None
    stack, mark, slot = name[len(_PREFIX) :].rpartition(_SLOT)
    return (stack, slot) if mark else None


def _variables(leaves: Iterable[Leaf]) -> set[tuple[str, ...]]:
    """Return the paths that have exactly `table` and, of any form, `slot` under them."""
    children: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    for leaf in leaves:
        for depth in range(1, len(leaf.path)):
            children[leaf.path[:depth]].add(leaf.path[depth])
    return {path for path, names in children.items() if names == {"table", "slot"}}


def _variables_role(leaf: Leaf, nodes: set[tuple[str, ...]]) -> tuple[str, str | None] | None:
    if leaf.path[:-1] in nodes and leaf.path[-1] == "table":
        return leaf.path[-2], None
    for depth in range(1, len(leaf.path) - 1):
        if leaf.path[:depth] in nodes and leaf.path[depth] == "slot":
            return leaf.path[depth - 1], "/".join(leaf.path[depth + 1 :])
    return None


def _known_role(leaf: Leaf, known: frozenset[str]) -> tuple[str, str | None] | None:
    if leaf.path[-1] in known:
        return leaf.path[-1], None
    return (leaf.path[-2], None) if leaf.path[-2:-1] and leaf.path[-2] in known and leaf.path[-1] == "table" else None


def match_specs(where: str, stacks: Iterable[TableLeaves], specs: Sequence[StackSpec]) -> dict[str, StackSpec]:
    """Return the spec of each stack.

    Raises:
        CheckpointFormatError: there are stacks and no specs.
        CheckpointMismatchError: the specs are for other stacks.
    """
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
    """Return the places of the tables of a stack [rows, dim], checked against its shape.

    Raises:
        CheckpointMismatchError: the stack has another shape, or a table is outside it, or overlaps another one.
    """
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
