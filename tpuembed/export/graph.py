"""The SavedModel without its tables: stacked variables that hold no data, and the signatures that gather from them.

`UninitializedVariable` keeps the variable and its checkpoint key in the object graph and writes no data; the table bytes
are added to the bundle afterwards. A stack that is mapped is no variable of the checkpoint: its graph names the file.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.ops import resource_variable_ops

from tpuembed.errors import ExportError, one_line
from tpuembed.export.examples import parse_examples, unparsable
from tpuembed.export.mapped_table import MappedTable
from tpuembed.export.packing import matrix_spec
from tpuembed.export.plan import StackPlan
from tpuembed.export.stacked_tables import StackedTables
from tpuembed.export.storage import STORAGES
from tpuembed.export.warmup import write_warmup
from tpuembed.manifest import FeatureEntry, Packing, TensorSpec, VocabularyEntry
from tpuembed.saved_model import GRAPH_FILE, replace_file

__all__ = ["SavedGraph", "Servable", "save_graph"]

Tensor = Any


class Servable(Protocol):
    """Named tensors in, named tensors out."""

    def input_specs(self) -> dict[str, Any]:
        """`tf.TensorSpec` by input name."""

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs of `inputs`."""

    def samples(self) -> list[dict[str, Any]]:
        """Inputs by name, in numpy, that are answered: of each size that shall be warm; none where that is not known."""

    def features(self) -> tuple[FeatureEntry, ...]:
        """For the manifest; none where it does not know which table an input is looked up in."""

    def padding(self) -> Mapping[str, int | str]:
        """What pads the inputs of a model that are lists, by name; nothing where `features` says it."""

    def vocabularies(self) -> tuple[VocabularyEntry, ...]:
        """Of its preprocessing layers."""

    def packing(self) -> Packing:
        """How the signature `packed` takes the inputs."""

    def packed(self, ids: Tensor) -> dict[str, Tensor]:
        """The outputs of `ids`, int64 [batch, columns]; called only where `packing` leaves nothing out."""


@dataclasses.dataclass(frozen=True)
class SavedGraph:
    """What was saved.

    Attributes:
        stack_keys: stack name -> checkpoint key of its variable.
        signatures, features, vocabularies, padding, packing: as the manifest lists them.
    """

    stack_keys: Mapping[str, str]
    signatures: Mapping[str, Mapping[str, Mapping[str, TensorSpec]]]
    features: tuple[FeatureEntry, ...]
    vocabularies: tuple[VocabularyEntry, ...]
    padding: Mapping[str, int | str]
    packing: Packing


def save_graph(
    servable: Servable,
    tables: StackedTables,
    stacks: Sequence[StackPlan],
    dense: Callable[[], Sequence[Any]],
    folder: Path,
    layout: str = "variables",
) -> SavedGraph:
    """Save `servable` into `folder`: the signatures `serving_default`, `serving_examples` and `packed`, and requests to warm up.

    Args:
        servable: what the signatures compute; it looks up in `tables`.
        tables: bound here to one uninitialised variable per stack, or to one `MappedTable`.
        stacks: of the plan.
        dense: called before anything is traced, for a trace may make constants of values: the tf.Variables that
            `servable` reads, with the values to save, and its hash tables.
        folder: an existing or new directory.
        layout: "mmap" maps each stack from the file `StackPlan.file`, a name that `assemble` replaces by a path.
    """
    root = tf.Module()
    make = _mapped if layout == "mmap" else _uninitialized
    variables = {stack.name: make(stack) for stack in stacks}
    root.stacks = _Children(variables)
    tables.bind(stacks, variables)
    # Plain variables: the C API does not find those of a Keras model that is itself part of the saved object.
    root.dense = list(dense())
    signatures = {name: _concrete(function) for name, function in _functions(servable).items()}
    with _writing(folder):
        _save(root, folder, signatures)
        if layout == "mmap" and not root.dense:
            _restore_nothing(folder)
    keys = {stack.name: f"stacks/{stack.name}/.ATTRIBUTES/VARIABLE_VALUE" for stack in stacks}
    with tables.rows_of_zeros():
        samples = servable.samples()
    if samples:
        with _writing(folder):
            write_warmup(folder, samples, signatures, servable.packing())
    described = {name: _signature_of(function) for name, function in signatures.items()}
    return SavedGraph(
        stack_keys=keys,
        signatures=described,
        features=servable.features(),
        vocabularies=servable.vocabularies(),
        padding=servable.padding(),
        packing=servable.packing(),
    )


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn TensorFlow's error of a disk into an ExportError."""
    try:
        yield
    except tf.errors.OpError as error:
        text = " ".join(error.message.split())
        raise ExportError(f"{folder}: TensorFlow cannot write the graph: {text}. Free space or fix the disk") from None


def _save(root: Any, folder: Path, signatures: Mapping[str, Any]) -> None:
    try:
        tf.saved_model.save(root, str(folder), signatures=signatures)
    except (OSError, tf.errors.OpError):  # of the disk
        raise
    except Exception as error:  # TensorFlow has no type for a function that it cannot save
        hint = ""
        if "untracked" in str(error):
            hint = (
                "; a function of the model keeps a variable that is no part of what is exported: read layer.embedding_tables in "
                "the call of a layer, without a tf.function of its own"
            )
        raise ExportError(f"model: TensorFlow cannot save it: {one_line(error)}{hint}") from error


def _restore_nothing(folder: Path) -> None:
    """Have loaders run no restore where no variable has a value: it would be a fifth of the time of a load."""
    path = folder / GRAPH_FILE
    saved = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    for meta_graph in saved.meta_graphs:
        meta_graph.ClearField("saver_def")
    replace_file(path, saved.SerializeToString(deterministic=True))


def _uninitialized(stack: StackPlan) -> Any:
    storage = STORAGES[stack.storage]
    return resource_variable_ops.UninitializedVariable(
        shape=_shape(stack), dtype=tf.as_dtype(storage.dtype), name=stack.name, trainable=False
    )


def _mapped(stack: StackPlan) -> MappedTable:
    return MappedTable(stack.name, _shape(stack), tf.as_dtype(STORAGES[stack.storage].dtype), stack.file)


def _shape(stack: StackPlan) -> tuple[int, int]:
    return stack.rows, STORAGES[stack.storage].columns(stack.dim)


class _Children(tf.Module):
    """Tracks each variable under its stack's name."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        super().__init__()
        for name, variable in variables.items():
            setattr(self, name, variable)


def _functions(servable: Servable) -> dict[str, Any]:
    specs = servable.input_specs()
    weighted = [feature.name for feature in servable.features() if feature.weighted]

    @tf.function(input_signature=[specs], autograph=False)
    def serving_default(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return servable(inputs)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="examples")], autograph=False)
    def serving_examples(examples: Tensor) -> dict[str, Tensor]:
        return servable(parse_examples(examples, specs, weighted, servable.padding()))

    functions = {"serving_default": serving_default}
    if reason := unparsable(specs):
        warnings.warn(f"no signature serving_examples: tf.train.Example cannot hold the input {reason}", stacklevel=2)
    else:
        functions["serving_examples"] = serving_examples
    if not servable.packing().left_out:
        functions["packed"] = _packed(servable)
    return functions


def _packed(servable: Servable) -> Any:
    @tf.function(input_signature=[matrix_spec(servable.packing())], autograph=False)
    def packed(ids: Tensor) -> dict[str, Tensor]:
        return servable.packed(ids)

    return packed


def _concrete(function: Any) -> Any:
    return function.get_concrete_function()


def _signature_of(function: Any) -> dict[str, dict[str, TensorSpec]]:
    arguments, keywords = function.structured_input_signature
    specs = [*tf.nest.flatten(arguments), *tf.nest.flatten(keywords)]
    outputs = function.structured_outputs
    return {
        "inputs": {spec.name: _spec_of(spec) for spec in specs},
        "outputs": {name: _spec_of(spec) for name, spec in outputs.items()},
    }


def _spec_of(spec: Any) -> TensorSpec:
    shape = None if spec.shape.rank is None else tuple(spec.shape.as_list())
    return TensorSpec(dtype=spec.dtype.name, shape=shape)
