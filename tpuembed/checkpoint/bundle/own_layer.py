"""Tables of `tpuembed.TPUEmbedding`: a node with the layer's config, and children `<table>`, `<table>/<slot>`.

Tables on SparseCores are in children `<stack>`, `<stack>/<slot>` instead, and another child has their places in the
stacks.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tpuembed.checkpoint.bundle.object_graph import Node, ObjectGraph
from tpuembed.checkpoint.bundle.rows import DENSE
from tpuembed.checkpoint.bundle.sparsecore import LAYOUTS, SparseCoreRows, sparse_core_layouts
from tpuembed.checkpoint.bundle.table_keys import TableKeys, table_info
from tpuembed.checkpoint.own_layer import OwnLayer, SavedArray, check_size, parse_config, slot_names
from tpuembed.checkpoint.types import Array
from tpuembed.errors import CheckpointCorruptError
from tpuembed.formats.tensor_bundle import Bundle
from tpuembed.vocabulary import attribute_of

__all__ = ["CONFIG_ATTRIBUTE", "ENGINE", "own_layer_configs", "own_layer_tables", "own_layers", "saved_array"]

ENGINE: Final = "_engine"
"""The child that is TensorFlow's handle of an accelerator, with the same variables again."""

_TABLES, _STAMPS, _HISTORY, _VOCABULARIES = "_tpu_embedding", "_row_stamps", "history", "_vocabularies"
_UPDATES: Final = "tpuembed_iterations"
"""The attribute with the count of updates."""

CONFIG_ATTRIBUTE: Final = "tpuembed_config"
"""The attribute with the config, on the node that holds a layer's tables."""


def own_layer_configs(bundle: Bundle, graph: ObjectGraph) -> dict[int, dict[str, Any]]:
    """Return node number -> config, for each of tpuembed's layers."""
    configs: dict[int, dict[str, Any]] = {}
    for number, node in enumerate(graph.nodes):
        if CONFIG_ATTRIBUTE not in node.attributes:
            continue
        key = node.attributes[CONFIG_ATTRIBUTE].checkpoint_key
        if key not in bundle.entries:
            raise _corrupt(bundle, f"its object graph puts a layer's config at {key}, which the index does not have")
        where = f"checkpoint {bundle.prefix}: the layer's config at {key}"
        configs[number] = parse_config(where, bundle.read_string(key))
    return configs


def own_layer_tables(
    bundle: Bundle, graph: ObjectGraph, configs: Mapping[int, Mapping[str, Any]]
) -> Iterator[TableKeys]:
    """Yield the tables that the `configs` name, each checked against its config."""
    where = f"checkpoint {bundle.prefix}"
    for number, config in configs.items():
        node = graph.nodes[number]
        stacked = _stacked_tables(bundle, graph, node, config)
        roles: dict[str, str] = {}
        for name, table in config["tables"].items():
            rows = stacked.get(name)
            stem = name if rows is None else rows.layout.stack
            home = f"table {name!r}" if rows is None else f"stack {stem!r}"
            slots = {slot: f"{stem}/{slot}" for slot in slot_names(where, name, table)}
            for slot, child in ((None, stem), *slots.items()):
                role = home if slot is None else f"slot {slot!r} of {home}"
                other = roles.setdefault(child, role)
                if other != role:  # tables of one stack share a child; any other would read another table's rows
                    raise _corrupt(
                        bundle, f"its layer's config uses {child!r} as {other} and {role}, which are not the same rows"
                    )
            keys = {slot: _value_key(bundle, graph, node, child) for slot, child in slots.items()}
            found = TableKeys(name, _value_key(bundle, graph, node, stem), keys, rows or DENSE)
            info = table_info(bundle, found)
            check_size(where, name, table, (info.rows, info.dim))
            yield found
        unknown = sorted(set(node.children) - roles.keys() - {ENGINE, LAYOUTS})
        if unknown:
            raise _corrupt(bundle, f"it has {unknown[0]!r}, which is not a table or slot of its layer's config")
        if (repeated := config.get("layouts")) is None:
            continue
        found_layouts = {
            name: {
                "stack": rows.layout.stack,
                "rows": rows.layout.shape[0],
                "dim": rows.layout.shape[1],
                "sparse_cores": rows.layout.num_sparse_cores,
                "rows_per_core": rows.layout.shard_rows,
                "offset": rows.layout.offset,
                "rotation": rows.layout.rotation,
            }
            for name, rows in stacked.items()
        }
        for name in sorted(found_layouts.keys() | set(repeated)):
            if found_layouts.get(name) != repeated.get(name):
                by_config = f"table {name!r} is at {repeated.get(name)} by its layer's config"
                raise _corrupt(bundle, f"{by_config}, but at {found_layouts.get(name)} by its {LAYOUTS}")


def own_layers(bundle: Bundle, graph: ObjectGraph, configs: Mapping[int, Mapping[str, Any]]) -> Iterator[OwnLayer]:
    """Yield what each layer saved beside its tables."""
    verify = functools.cache(bundle.verify)
    for number, config in configs.items():
        holders = [node for node in graph.nodes if node.children.get(_TABLES) == number]
        beside = {name: graph.nodes[child] for node in holders for name, child in node.children.items()}
        history, stamps = None, beside.get(_STAMPS)
        if stamps is not None:
            attribute = stamps.attributes.get(_HISTORY)
            if attribute is None or attribute.checkpoint_key not in bundle.entries:
                raise _corrupt(bundle, "a layer has stamps of rows without their history")
            history = functools.partial(bundle.read_string, attribute.checkpoint_key)
        names = beside[_VOCABULARIES].attributes if _VOCABULARIES in beside else {}
        count = (
            graph.nodes[number].attributes[_UPDATES].checkpoint_key
            if _UPDATES in graph.nodes[number].attributes
            else ""
        )
        yield OwnLayer(
            where=f"checkpoint {bundle.prefix}",
            config=config,
            updates=saved_array(bundle, count) if count in bundle.entries else None,
            history=history,
            stamps=lambda table, node=stamps: saved_array(bundle, _value_key(bundle, graph, node, table)),  # type: ignore[misc]
            verify=verify,
            vocabularies={name: saved_array(bundle, one.checkpoint_key) for name, one in names.items()},
            stored_name=attribute_of,
        )


def saved_array(bundle: Bundle, key: str) -> SavedArray:
    """Return the tensor `key`."""

    def fill(start: int, out: Array) -> None:
        if out.shape:
            bundle.read_rows(key, start, start + len(out), out)
        else:
            out[()] = bundle.read(key)

    entry = bundle.entries.get(key)
    return SavedArray(key, "" if entry is None else entry.dtype, None if entry is None else tuple(entry.shape), fill)


def _stacked_tables(
    bundle: Bundle, graph: ObjectGraph, node: Node, config: Mapping[str, Any]
) -> dict[str, SparseCoreRows]:
    """Return the rows of the tables of a layer that are on SparseCores, by name.

    Mod-sharded rows can be in a tensor of the table's own name and shape, so the layouts must be valid.
    """
    layouts = [layout for stack in sparse_core_layouts(bundle, graph, node).values() for layout in stack]
    if LAYOUTS in node.children and not layouts:
        raise _corrupt(bundle, f"its {LAYOUTS} are empty, but a layer without tables on SparseCores has none")
    unknown = sorted({layout.table for layout in layouts} - set(config["tables"]))
    if unknown:
        raise _corrupt(bundle, f"its {LAYOUTS} have {unknown[0]!r}, which is not a table of its layer's config")
    return {layout.table: SparseCoreRows(layout) for layout in layouts}


def _value_key(bundle: Bundle, graph: ObjectGraph, node: Node, child: str) -> str:
    number = node.children.get(child)
    key = None if number is None else graph.nodes[number].value_key
    if key is None:
        raise _corrupt(bundle, f"its layer's config needs {child!r}, but there is no such variable")
    return key


def _corrupt(bundle: Bundle, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError.of(f"checkpoint {bundle.prefix}: {what}")
