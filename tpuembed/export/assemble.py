"""Join the graph that TensorFlow saved with the table data that workers wrote, prove the whole, publish it.

TensorFlow's bundle in `variables/` holds the dense variables and the object graph, which names a key for every stacked
variable and no data. The tables' files become further data files of that bundle, and the index is written anew.
"""

from collections.abc import Mapping
from pathlib import Path

import tpuembed
from tpuembed.checkpoint.object_graph import OBJECT_GRAPH_KEY, ObjectGraph
from tpuembed.errors import ExportError
from tpuembed.export.execute import StreamReport
from tpuembed.export.plan import ExportPlan, StackPlan
from tpuembed.export.staging import Staging
from tpuembed.export.storage import STORAGES
from tpuembed.manifest import Manifest, StackEntry, TableEntry, TensorSpec
from tpuembed.protobuf import Message
from tpuembed.tensor_bundle import (
    Bundle,
    BundleIndex,
    Entry,
    index_path,
    merge_entries,
    read_index,
    shard_path,
    write_index,
)

__all__ = ["assemble"]

_PREFIX = Path("variables", "variables")

Signatures = Mapping[str, Mapping[str, Mapping[str, TensorSpec]]]


def assemble(
    staging: Staging,
    plan: ExportPlan,
    streamed: StreamReport,
    *,
    stack_keys: Mapping[str, str],
    signatures: Signatures,
    source: Mapping[str, str],
) -> Path:
    """Complete the SavedModel in `staging.path` with the tables in `streamed.folder`, and commit it.

    Args:
        staging: holds what `tf.saved_model.save` wrote, its stacked variables uninitialised.
        plan, streamed: the tables; `streamed.folder` lies on the file system of the staging folder.
        stack_keys: stack name -> the variable's checkpoint key in the saved object graph.
        signatures, source: for the manifest.

    Returns:
        The path of the version that is now visible.

    Raises:
        ExportError: graph and tables do not fit together, or the version cannot be committed; nothing is published.
    """
    prefix = staging.path / _PREFIX
    _check_keys(plan, stack_keys, prefix)
    _check_shapes(plan, staging.path / "saved_model.pb")
    dense = read_index(index_path(prefix))
    merged = merge_entries([dense, _table_index(plan, streamed, stack_keys)])
    _move_dense_files(prefix, dense.num_shards, merged.num_shards)
    for number, stack in enumerate(plan.stacks, start=dense.num_shards):
        _link(streamed.folder / stack.file, shard_path(prefix, number, merged.num_shards))
    write_index(index_path(prefix), merged.entries, merged.num_shards)
    _check_bundle(prefix, merged)
    _manifest(plan, streamed, merged, stack_keys, signatures, source).write(staging.path)
    return staging.commit()


def _link(source: Path, target: Path) -> None:
    """Have the version share a data file, which a killed export's next one finds where it was; move it where it cannot."""
    try:
        target.hardlink_to(source)
    except OSError:
        source.rename(target)


def _check_keys(plan: ExportPlan, stack_keys: Mapping[str, str], prefix: Path) -> None:
    """Raise ExportError unless the saved graph restores exactly the stacks of the plan."""
    planned = {stack.name for stack in plan.stacks}
    if planned != set(stack_keys):
        raise ExportError(f"the plan has the stacks {sorted(planned)} and the graph has {sorted(stack_keys)}")
    with Bundle.open(prefix) as bundle:
        if unknown := set(stack_keys.values()) - _graph_keys(bundle):
            raise ExportError(f"bundle {prefix}: the saved graph restores no variable under {sorted(unknown)}")


def _check_shapes(plan: ExportPlan, saved_model: Path) -> None:
    """Raise ExportError unless every stack's variable was saved with the shape that its data has."""
    saved = _variable_shapes(saved_model)
    for stack in plan.stacks:
        if saved.get(stack.name) != _stored_shape(stack):
            raise ExportError(
                f"stack {stack.name!r}: its data is {list(_stored_shape(stack))} "
                f"and the graph's variable {list(saved.get(stack.name, ()))}"
            )


def _variable_shapes(saved_model: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the saved variables by name.

    Source: SavedModel.meta_graphs = 2, MetaGraphDef.object_graph_def = 7, SavedObjectGraph.nodes = 1,
    SavedObject.variable = 7, SavedVariable.shape = 2 and .name = 6, TensorShapeProto.dim = 2 and its size = 1, in
    tensorflow/core/protobuf and tensorflow/core/framework.
    """
    graphs = Message(saved_model.read_bytes()).messages(2)
    nodes = [node for graph in graphs for node in graph.message(7).messages(1) if node.has(7)]
    variables = [node.message(7) for node in nodes]
    return {variable.text(6): tuple(dim.signed(1) for dim in variable.message(2).messages(2)) for variable in variables}


def _stored_shape(stack: StackPlan) -> tuple[int, int]:
    return stack.rows, STORAGES[stack.storage].columns(stack.dim)


def _table_index(plan: ExportPlan, streamed: StreamReport, stack_keys: Mapping[str, str]) -> BundleIndex:
    """The index of the stacks' files, as a bundle of their own."""
    entries = {
        stack_keys[stack.name]: Entry(
            dtype=STORAGES[stack.storage].dtype.name,
            shape=_stored_shape(stack),
            shard=number,
            offset=stack.offset,
            size=stack.size,
            crc32c=streamed.crc32c[stack.name],
        )
        for number, stack in enumerate(plan.stacks)
    }
    return BundleIndex(entries, len(plan.stacks))


def _move_dense_files(prefix: Path, dense_shards: int, num_shards: int) -> None:
    for number in range(dense_shards):
        shard_path(prefix, number, dense_shards).rename(shard_path(prefix, number, num_shards))


def _check_bundle(prefix: Path, expected: BundleIndex) -> None:
    """Raise ExportError unless the written bundle says what was meant and holds a value for every key of the graph.

    Opening it proves the index against itself and against the sizes of the data files.
    """
    with Bundle.open(prefix) as bundle:
        missing = _graph_keys(bundle) - set(bundle.entries)
        if dict(bundle.entries) != dict(expected.entries):
            raise ExportError(f"bundle {prefix}: its index does not read back as it was written; export again")
    if missing:
        raise ExportError(f"bundle {prefix}: the graph restores {sorted(missing)} and the bundle has no value for them")


def _graph_keys(bundle: Bundle) -> set[str]:
    """The checkpoint keys of the variables in the saved object graph."""
    graph = ObjectGraph.parse(bundle.read_string(OBJECT_GRAPH_KEY))
    return {node.value_key for node in graph.nodes if node.value_key is not None}


def _manifest(
    plan: ExportPlan,
    streamed: StreamReport,
    merged: BundleIndex,
    stack_keys: Mapping[str, str],
    signatures: Signatures,
    source: Mapping[str, str],
) -> Manifest:
    return Manifest(
        tool_version=tpuembed.__version__,
        source=source,
        layout=plan.layout,
        tables=tuple(entry for stack in plan.stacks for entry in _table_entries(stack)),
        stacks=tuple(_stack_entry(stack, streamed, merged, stack_keys[stack.name]) for stack in plan.stacks),
        signatures=signatures,
    )


def _table_entries(stack: StackPlan) -> list[TableEntry]:
    return [
        TableEntry(
            name=table.table,
            rows=table.rows,
            dim=stack.dim,
            dtype=table.source_dtype,
            stack=stack.name,
            row_offset=table.row_offset,
        )
        for table in stack.tables
    ]


def _stack_entry(stack: StackPlan, streamed: StreamReport, merged: BundleIndex, key: str) -> StackEntry:
    return StackEntry(
        name=stack.name,
        key=key,
        rows=stack.rows,
        dim=stack.dim,
        storage=stack.storage,
        file=str(shard_path(_PREFIX, merged.entries[key].shard, merged.num_shards)),
        offset=stack.offset,
        size=stack.size,
        crc32c=streamed.crc32c[stack.name],
    )
