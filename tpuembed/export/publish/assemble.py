"""Join the graph that TensorFlow saved with the table data that workers wrote, verify the result, and publish it.

TensorFlow's bundle in `variables/` holds the dense variables and the object graph. The object graph names a key,
without data, for every stacked variable. The tables' files become further data files of that bundle, and the index is
rewritten.
"""

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import tpuembed
from tpuembed.errors import ExportError
from tpuembed.export.plan.plan import ArrayPlan, Placement, StackPlan
from tpuembed.export.publish.layouts import BUNDLE, graph_keys
from tpuembed.export.publish.version_writer import VersionWriter
from tpuembed.export.report import SavedGraph, StreamReport
from tpuembed.files import FilePath
from tpuembed.formats.saved_model import GRAPH_FILE, file_crc32c
from tpuembed.formats.tensor_bundle import (
    Bundle,
    BundleIndex,
    Entry,
    index_path,
    merge_entries,
    read_index,
    shard_path,
    write_index,
)
from tpuembed.manifest import (
    ArrayEntry,
    FileEntry,
    HistoryEntry,
    Manifest,
    OverlayEntry,
    QuantizationEntry,
    StackEntry,
    TableEntry,
)

__all__ = ["assemble"]


def assemble(
    writer: VersionWriter,
    streamed: StreamReport,
    graph: SavedGraph,
    source: Mapping[str, str],
    histories: Mapping[str, HistoryEntry],
) -> FilePath:
    """Complete the SavedModel in `writer.path` with the tables in `streamed.folder`, and publish it.

    Args:
        writer: `writer.path` has what `tf.saved_model.save` wrote, with its stacked variables uninitialised.
        streamed: the tables; `streamed.folder` is on the file system of `writer.path`.
        graph: describes the saved graph; its `array_keys` are the keys of the stacks' arrays in the bundle.
        source: the checkpoint, for the manifest.
        histories: of its tables whose rows are tracked, for the manifest.

    Returns:
        The path of the published version.

    Raises:
        ExportError: graph and tables do not match, or the version cannot be published. Nothing is published.
    """
    plan, layout, keys = writer.plan, writer.layout, graph.array_keys
    prefix = writer.path / BUNDLE
    arrays = [array for stack in plan.stacks for array in stack.arrays]
    planned = {array.name for array in arrays}
    if planned != set(keys):
        raise ExportError(
            f"the plan has the stacks {', '.join(sorted(planned))}, but the graph has {', '.join(sorted(keys))}."
        )
    layout.check(writer.path, plan.stacks, keys)
    dense = read_index(index_path(prefix))
    merged = merge_entries([dense, _table_index(arrays, streamed, keys)])
    for number in range(dense.num_shards):
        shard_path(prefix, number, dense.num_shards).rename(shard_path(prefix, number, merged.num_shards))
    for number, array in enumerate(arrays, start=dense.num_shards):
        _link(streamed.folder / array.file, shard_path(prefix, number, merged.num_shards))
    write_index(index_path(prefix), merged.entries, merged.num_shards)
    _check_bundle(prefix, merged)
    layout.place(writer.path, {array.file: _file(merged, keys[array.name]) for array in arrays})
    manifest = Manifest(
        tool_version=tpuembed.__version__,
        source=source,
        layout=plan.layout,
        tables=tuple(_table_entry(stack, table) for stack in plan.stacks for table in stack.tables),
        stacks=tuple(_stack_entry(stack, streamed, merged, keys) for stack in plan.stacks),
        signatures=graph.signatures,
        errors={table: dataclasses.asdict(error) for table, error in streamed.errors.items()},
        features=graph.features,
        vocabularies=graph.vocabularies,
        padding=graph.padding,
        packing=graph.packing,
        from_activations=graph.from_activations,
        finite=plan.require_finite,
        base=streamed.base,
        histories=histories,
        names=graph.names,
        retrieval=graph.retrieval,
        row_proof=graph.row_proof,
    )
    if (
        graph.row_proof is not None
    ):  # `layout.place` made the graph's paths relative, so these bytes are its `relative_graph`
        sha256 = hashlib.sha256((writer.path / GRAPH_FILE).read_bytes()).hexdigest()
        manifest = dataclasses.replace(manifest, row_proof=dataclasses.replace(graph.row_proof, sha256=sha256))
    manifest = dataclasses.replace(manifest, files=_other_files(writer.path, manifest))
    manifest.write(writer.path)
    return writer.publish(lambda name: layout.settle(writer.path, manifest, name))


def _link(source: Path, target: Path) -> None:
    """Hard-link a data file into the version, so that a resumed export still finds the original. Move it if links fail."""
    try:
        target.hardlink_to(source)
    except OSError:
        source.rename(target)


def _table_index(arrays: Sequence[ArrayPlan], streamed: StreamReport, keys: Mapping[str, str]) -> BundleIndex:
    """Return the index of the arrays' files, as if they were a bundle of their own."""
    entries = {
        keys[array.name]: Entry(
            dtype=array.dtype,
            shape=array.shape,
            shard=number,
            offset=0,
            size=array.size,
            crc32c=streamed.crc32c[array.name],
        )
        for number, array in enumerate(arrays)
    }
    return BundleIndex(entries, len(arrays))


def _check_bundle(prefix: Path, expected: BundleIndex) -> None:
    """Raise ExportError unless the written index equals `expected` and has a value for every key of the graph.

    Opening the bundle checks the index against itself and against the sizes of the data files.
    """
    with Bundle.open(prefix) as bundle:
        missing = graph_keys(bundle) - set(bundle.entries)
        if dict(bundle.entries) != dict(expected.entries):
            raise ExportError(f"bundle {prefix}: its index does not read back as it was written. Export again.")
    if missing:
        raise ExportError(
            f"bundle {prefix}: the graph restores {', '.join(sorted(missing))}, and the bundle has no value for them."
        )


def _file(merged: BundleIndex, key: str) -> str:
    """Return the path inside the version of the data file of the array with this key."""
    return str(shard_path(BUNDLE, merged.entries[key].shard, merged.num_shards))


def _other_files(version: Path, manifest: Manifest) -> dict[str, FileEntry]:
    """Return the manifest entries of all files in `version` except table data."""
    files = (Path(folder, name) for folder, _, names in os.walk(version) for name in names)
    by_name = {path.relative_to(version).as_posix(): path for path in files}
    others = sorted(by_name.keys() - manifest.table_files().keys())
    return {name: FileEntry(size=by_name[name].stat().st_size, crc32c=file_crc32c(by_name[name])) for name in others}


def _table_entry(stack: StackPlan, table: Placement) -> TableEntry:
    return TableEntry(
        name=table.table,
        rows=table.rows,
        dim=stack.dim,
        dtype=table.source_dtype,
        stack=stack.name,
        row_offset=table.row_offset,
        quantization=None if table.quantization is None else QuantizationEntry(**table.quantization),
    )


def _stack_entry(stack: StackPlan, streamed: StreamReport, merged: BundleIndex, keys: Mapping[str, str]) -> StackEntry:
    own, *more = (
        ArrayEntry(
            name=array.name,
            key=keys[array.name],
            rows=array.shape[0],
            file=_file(merged, keys[array.name]),
            size=array.size,
            crc32c=streamed.crc32c[array.name],
        )
        for array in stack.arrays
    )
    overlay = None
    if stack.overlay_rows is not None:
        rows, words = more
        overlay = OverlayEntry(
            rows=rows,
            words=words,
            crc32c=streamed.full_crc32c.get(stack.name),
        )
    return StackEntry(
        name=stack.name,
        key=own.key,
        rows=stack.rows,
        dim=stack.dim,
        storage=stack.storage,
        file=own.file,
        offset=0,
        size=own.size,
        crc32c=own.crc32c,
        base_file=streamed.base_files.get(stack.name, ""),
        overlay=overlay,
    )
