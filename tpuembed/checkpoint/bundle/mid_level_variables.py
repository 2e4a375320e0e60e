"""Variables that TensorFlow's mid-level embedding classes save under their names on any hardware.

Source: tensorflow/python/tpu/tpu_embedding_base.py.
"""

from collections.abc import Iterator
from typing import Final

from tpuembed.checkpoint.bundle.object_graph import Node, ObjectGraph
from tpuembed.checkpoint.bundle.table_keys import TableKeys, optimizer_slots
from tpuembed.errors import CheckpointCorruptError
from tpuembed.tensor_bundle import Bundle

__all__ = ["mid_level_nodes", "mid_level_variables"]

_CHILDREN: Final = {"_feature_config", "_table_config"}
_PARAMETERS: Final = "parameters"


def mid_level_nodes(graph: ObjectGraph) -> list[int]:
    """Return the numbers of the mid-level objects' nodes."""
    return [number for number, node in enumerate(graph.nodes) if set(node.children) >= _CHILDREN]


def mid_level_variables(bundle: Bundle, graph: ObjectGraph, node: Node) -> Iterator[TableKeys]:
    """Yield the tables of a mid-level object, or its stacks if it was saved from SparseCores, with their slots.

    Raises:
        CheckpointCorruptError: one has no value.
    """
    variables = graph.nodes[node.children["_variables"]] if "_variables" in node.children else None
    for name, child in variables.children.items() if variables is not None else ():
        roles = graph.nodes[child].children  # `parameters`, and each slot of its own optimizer
        keys = {role: graph.nodes[number].value_key for role, number in roles.items()}
        key = keys.pop(_PARAMETERS, None)
        slots = {slot: value for slot, value in keys.items() if value is not None}
        if key is None or len(slots) < len(keys):
            raise CheckpointCorruptError(
                f"checkpoint {bundle.prefix}: table {name!r} has no value for {_PARAMETERS!r} or a slot, only for "
                f"{', '.join(sorted(slots)) or 'nothing'}. Save it again."
            )
        yield TableKeys(name, key, {**optimizer_slots(bundle, graph, roles[_PARAMETERS]), **slots})
