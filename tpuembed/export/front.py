"""A front: a version without the tables whose rows are in Redis. Servers load it, and fetch rows."""

import dataclasses
from collections.abc import Collection
from pathlib import Path, PurePosixPath

import numpy as np

from tpuembed.checkpoint.bundle.object_graph import OBJECT_GRAPH_KEY, ObjectGraph
from tpuembed.export.publish.folder import link_or_copy
from tpuembed.export.publish.layouts import BUNDLE
from tpuembed.formats.saved_model import GRAPH_FILE, file_crc32c, mapped_from, without_rows
from tpuembed.formats.tensor_bundle import Bundle, index_path, read_index, write_index
from tpuembed.manifest import NAMES_FOLDER, ArrayEntry, FileEntry, Manifest, NamesEntry, RowStoreEntry

__all__ = ["write_front"]


def write_front(folder: Path, manifest: Manifest, entry: RowStoreEntry, target: Path) -> Manifest:
    """Write the version in `folder` without the arrays of `entry` into the new folder `target`. Return its manifest.

    The graph's tables have no rows, so that it loads, and no id can be looked up by it.
    """
    left = [array for stack in manifest.stacks for array in stack.arrays if array.name in entry.arrays]
    files = {array.file for array in left}
    made = {GRAPH_FILE.as_posix(), index_path(BUNDLE).as_posix()}
    kept = {file for file in (*manifest.files, *manifest.table_files()) if not file.startswith("assets.extra/")}
    for file in sorted(kept - files - made):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy((folder / file).resolve(), target / file)
    names = tuple(_names_in_files(folder, manifest, number, target) for number in range(len(manifest.names)))
    front = dataclasses.replace(
        manifest,
        row_store=entry,
        row_proof=None if manifest.layout == "mmap" else manifest.row_proof,  # of another graph
        base=None,
        stacks=tuple(dataclasses.replace(stack, base_file="") for stack in manifest.stacks),
        names=names,
    )
    graph = (folder / GRAPH_FILE).read_bytes()
    if manifest.layout == "mmap":
        graph = mapped_from(without_rows(graph, left), front, PurePosixPath())
    (target / GRAPH_FILE).write_bytes(graph)
    _write_index(folder, {array.key for array in left}, target)
    entries = {file: manifest.files[file] for file in kept - made if file in manifest.files}
    for file in made:
        entries[file] = FileEntry(size=(target / file).stat().st_size, crc32c=file_crc32c(target / file))
    front = dataclasses.replace(front, files=dict(sorted(entries.items())))
    front.write(target)
    return front


def _write_index(folder: Path, keys: Collection[str], target: Path) -> None:
    """Write the bundle's index. The tensors of `keys` have no rows, in the first data file, which is never a table's."""
    index = read_index(index_path(folder / BUNDLE))
    entries = {
        key: dataclasses.replace(one, shape=(0, *one.shape[1:]), shard=0, offset=0, size=0, crc32c=0)
        if key in keys
        else one
        for key, one in index.entries.items()
    }
    write_index(index_path(target / BUNDLE), entries, index.num_shards)


def _names_in_files(folder: Path, manifest: Manifest, number: int, target: Path) -> NamesEntry:
    """Return the entry of a table's names, whose arrays are files. With layout variables, they are written to `target`."""
    entry = manifest.names[number]
    if entry.arrays:
        return entry
    arrays = []
    with Bundle.open(folder / BUNDLE) as bundle:
        nodes = ObjectGraph.parse(bundle.read_string(OBJECT_GRAPH_KEY)).nodes
        keys = {node.full_name: node.value_key for node in nodes if node.value_key is not None}
        for what in ("keys", "numbers"):
            name, file = f"names_{number}_{what}", f"{NAMES_FOLDER}/{number}.{what}"
            value = np.ascontiguousarray(bundle.read(keys[name]))
            (target / file).parent.mkdir(exist_ok=True)
            (target / file).write_bytes(value.tobytes())
            checksum = file_crc32c(target / file)
            arrays.append(ArrayEntry(name=name, key="", rows=len(value), file=file, size=value.nbytes, crc32c=checksum))
    return dataclasses.replace(entry, arrays=tuple(arrays))
