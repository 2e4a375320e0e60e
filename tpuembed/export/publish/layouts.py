"""How a server loads the tables of an export: one class per layout, chosen once.

Both layouts consist of the same files, except for saved_model.pb. Each stack is a data file of the bundle
`variables/variables` and starts at its first byte. `variables` restores the file into a variable. `mmap` maps the file
in place, so its graph contains the path.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tpuembed.checkpoint.bundle.object_graph import OBJECT_GRAPH_KEY, ObjectGraph
from tpuembed.config.checks import check_choice
from tpuembed.errors import ConfigError, ExportError
from tpuembed.export.plan.plan import StackPlan
from tpuembed.formats.protobuf import Message
from tpuembed.formats.saved_model import (
    GRAPH_FILE,
    check_root,
    mapped_from,
    replace_file,
    replace_paths,
)
from tpuembed.formats.tensor_bundle import Bundle, index_path, read_index, shard_path
from tpuembed.manifest import LAYOUTS, Manifest

__all__ = ["BUNDLE", "Layout", "check_layout", "choose_layout", "data_file_names", "graph_keys"]

BUNDLE: Final = Path("variables", "variables")
"""The path of the bundle in a version. TensorFlow's data files come first in it, then one per stack."""


def check_layout(layout: str, serving_root: str | None) -> None:
    """Raise ConfigError unless `layout` is known and supports `serving_root`, if that is given."""
    check_choice("layout", layout, LAYOUTS)
    if serving_root is None:
        return
    if layout != "mmap":
        raise ConfigError(
            f"serving_root: supported only for layout mmap; an export of layout {layout} loads from any folder. "
            "Leave it out."
        )
    check_root(serving_root)


class Layout:
    """The steps that depend on the layout, after the graph is saved. Here stacks are variables that the checkpoint restores."""

    def check(self, version: Path, stacks: Sequence[StackPlan], array_keys: Mapping[str, str]) -> None:
        """Raise ExportError unless the graph in `version` uses exactly `stacks`, with their shapes."""
        prefix = version / BUNDLE
        with Bundle.open(prefix) as bundle:
            if unknown := set(array_keys.values()) - graph_keys(bundle):
                raise ExportError(
                    f"bundle {prefix}: the saved graph restores no variable under {', '.join(sorted(unknown))}."
                )
        saved = _variable_shapes((version / GRAPH_FILE).read_bytes())
        for array in (array for stack in stacks for array in stack.arrays):
            if saved.get(array.name) != array.shape:
                raise ExportError(
                    f"stack {array.name!r}: its data has shape {list(array.shape)}, but the graph's "
                    f"variable has {list(saved.get(array.name, ()))}."
                )

    def place(self, version: Path, files: Mapping[str, str]) -> None:
        """Record in the graph that the data of the array `ArrayPlan.file` is in `files[it]`, inside the version."""

    def settle(self, version: Path, manifest: Manifest, name: str) -> None:
        """Prepare the graph for `version` to be served under `name`. Variables can be served from anywhere."""


class _Mapped(Layout):
    """The layout whose stacks are mapped from their files in `root`/<name>/."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def check(self, version: Path, stacks: Sequence[StackPlan], array_keys: Mapping[str, str]) -> None:
        """Do nothing: `settle` compares what the graph maps with the manifest."""

    def place(self, version: Path, files: Mapping[str, str]) -> None:
        graph = (version / GRAPH_FILE).read_bytes()
        replace_file(version / GRAPH_FILE, replace_paths(graph, files))

    def settle(self, version: Path, manifest: Manifest, name: str) -> None:
        graph = (version / GRAPH_FILE).read_bytes()
        replace_file(version / GRAPH_FILE, mapped_from(graph, manifest, self._root / name))


def choose_layout(layout: str, model_dir: Path | None, serving_root: str | None) -> Layout:
    """Return the layout of that name, for exports served from `model_dir`, or from `serving_root` if it is given.

    Layout `mmap` needs one of both.
    """
    check_layout(layout, serving_root)
    if layout != "mmap":
        return Layout()
    if serving_root is None:
        assert model_dir is not None
        serving_root = str(model_dir.absolute())
    return _Mapped(serving_root)


def _variable_shapes(graph: bytes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the saved variables by name.

    Source: SavedModel.meta_graphs = 2, MetaGraphDef.object_graph_def = 7, SavedObjectGraph.nodes = 1,
    SavedObject.variable = 7, SavedVariable.shape = 2 and .name = 6, TensorShapeProto.dim = 2 and its size = 1, in
    tensorflow/core/protobuf and tensorflow/core/framework.
    """
    nodes = [node for meta in Message(graph).messages(2) for node in meta.message(7).messages(1) if node.has(7)]
    variables = [node.message(7) for node in nodes]
    return {variable.text(6): tuple(dim.signed(1) for dim in variable.message(2).messages(2)) for variable in variables}


def graph_keys(bundle: Bundle) -> set[str]:
    """Return the checkpoint keys of the variables in the saved object graph."""
    graph = ObjectGraph.parse(bundle.read_string(OBJECT_GRAPH_KEY))
    return {node.value_key for node in graph.nodes if node.value_key is not None}


def data_file_names(version: Path, stacks: Sequence[StackPlan]) -> Mapping[str, str]:
    """Return the path inside `version` of the data file of each `StackPlan.file`. Call it right after the graph is
    saved.
    """
    first = read_index(index_path(version / BUNDLE)).num_shards
    count = first + len(stacks)
    return {
        stack.file: shard_path(BUNDLE, number, count).as_posix() for number, stack in enumerate(stacks, start=first)
    }
