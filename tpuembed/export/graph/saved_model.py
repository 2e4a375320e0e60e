"""Saves the SavedModel without its tables: stacked variables that hold no data, and the signatures that gather from
them.

`UninitializedVariable` keeps the variable and its checkpoint key in the object graph and writes no data. The table
bytes are added to the bundle afterwards. A mapped stack is not a variable of the checkpoint: its graph names the file.
"""

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.ops import resource_variable_ops

from tpuembed.errors import ExportError, one_line, warn
from tpuembed.export.graph.examples import parse_examples, unparsable
from tpuembed.export.graph.mapped_table import MappedTable
from tpuembed.export.graph.stacked_tables import StackedTables, make_names
from tpuembed.export.graph.warmup import write_warmup
from tpuembed.export.plan.plan import ArrayPlan, StackPlan
from tpuembed.export.report import SavedGraph
from tpuembed.formats.dtypes import numpy_dtype
from tpuembed.formats.saved_model import GRAPH_FILE, replace_file
from tpuembed.manifest import (
    FeatureEntry,
    FromActivations,
    Packing,
    RetrievalEntry,
    RowProofEntry,
    TensorSpec,
    VocabularyEntry,
)
from tpuembed.row_proof import VERSION, prove
from tpuembed.vocabulary import Vocabulary

__all__ = ["ExportableModel", "save_graph"]

Tensor = Any


class ExportableModel(abc.ABC):
    """A model that can be saved: it maps named tensors to named tensors."""

    @abc.abstractmethod
    def input_specs(self) -> dict[str, Any]:
        """Return `tf.TensorSpec` by input name."""

    @abc.abstractmethod
    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs for `inputs`."""

    @abc.abstractmethod
    def samples(self, vocabularies: Mapping[str, Vocabulary]) -> list[dict[str, Any]]:
        """Return valid inputs by name, in numpy, one for each batch size to warm up; empty if valid inputs are not
        known.

        Args:
            vocabularies: of the tables that are looked up in by name.
        """

    def packed_sample(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return one of `samples` with the integers that `packed` takes."""
        return sample

    def features(self) -> tuple[FeatureEntry, ...]:
        """Return the features for the manifest; empty if the table of an input is not known."""
        return ()

    def padding(self) -> Mapping[str, int | str]:
        """Return the padding of a model's list inputs, by name; empty if `features` has it."""
        return {}

    def vocabularies(self) -> tuple[VocabularyEntry, ...]:
        """Return the vocabularies of its preprocessing layers."""
        return ()

    def packing(self) -> Packing:
        """Return how the signature `packed` takes the inputs. Models have none: one matrix makes them no faster (measured)."""
        return Packing(left_out="a model takes its inputs by name")

    def packed(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the outputs for `ids`, int64 [batch, columns]. Called only if `packing` leaves nothing out."""
        raise NotImplementedError

    def from_activations(self, tables: StackedTables) -> tuple[FromActivations, Any | None]:  # noqa: ARG002
        """Return the signature `from_activations` for the manifest, and its traced function; None if it is left out."""
        return FromActivations(left_out="the outputs are the activations"), None

    def write_index(self, folder: Path, layout: str) -> tuple[Mapping[str, Any], RetrievalEntry | None]:  # noqa: ARG002
        """Write the arrays of an index of candidates. Return what the graph reads them from by name, and their entry; none by
        default.
        """
        return {}, None

    def further_functions(self) -> dict[str, Any]:
        """Return functions for more signatures, by name. Called after `write_index`."""
        return {}


def save_graph(
    model: ExportableModel,
    tables: StackedTables,
    stacks: Sequence[StackPlan],
    dense: Callable[[], Sequence[Any]],
    folder: Path,
    layout: str = "variables",
    *,
    require_finite: bool = False,
) -> SavedGraph:
    """Save `model` into `folder`, with the signatures `serving_default`, `serving_examples`, `packed` and `from_activations`,
    and warmup requests.

    Args:
        model: the model to save; it looks up in `tables`.
        tables: bound here to one uninitialised variable per array of a stack, or to one `MappedTable`.
        stacks: of the plan.
        dense: returns the tf.Variables that `model` reads, with the values to save, and its hash tables. Called before
            anything is traced, because a trace may make constants of values.
        folder: an existing or new directory.
        layout: "mmap" maps each array from the file `ArrayPlan.file`, a name that `assemble` replaces by a path.
        require_finite: fail at a NaN or an infinity in a dense variable.

    Raises:
        ExportError: TensorFlow cannot save the model, or a variable must be finite and is not.
    """
    root = tf.Module()
    variables = {array.name: _variable(array, layout) for stack in stacks for array in stack.arrays}
    root.stacks = tf.Module()
    for name, variable in variables.items():
        setattr(root.stacks, name, variable)
    tables.bind(stacks, variables)
    arrays, names = make_names(tables.vocabularies, folder, layout)
    root.names = tf.Module()
    for number, table in enumerate(sorted(arrays)):
        setattr(root.names, f"keys_{number}", arrays[table].keys)
        setattr(root.names, f"numbers_{number}", arrays[table].numbers)
    tables.bind_names(arrays)
    index, retrieval = model.write_index(folder, layout)
    root.index = tf.Module()
    for name, variable in index.items():
        setattr(root.index, name, variable)
    # Plain variables: the C API does not find those of a Keras model that is itself part of the saved object.
    root.dense = list(dense())
    if require_finite:
        for variable in root.dense:
            _check_finite(variable)
    signatures = {name: function.get_concrete_function() for name, function in _functions(model).items()}
    from_activations, function = model.from_activations(tables)
    if function is not None:
        signatures["from_activations"] = function
    with _writing(folder):
        _save(root, folder, signatures)
        if layout == "mmap" and not root.dense:  # names are mapped too
            _restore_nothing(folder)
    with tables.rows_of_zeros():
        samples = model.samples(tables.vocabularies)
    if samples:
        with _writing(folder):
            activations = [feature.name for feature in from_activations.features]
            packed = [model.packed_sample(sample) for sample in samples]
            write_warmup(folder, samples, signatures, model.packing(), activations, packed)
    return SavedGraph(
        array_keys={name: f"stacks/{name}/.ATTRIBUTES/VARIABLE_VALUE" for name in variables},
        signatures={name: _signature_of(function) for name, function in signatures.items()},
        features=model.features(),
        vocabularies=model.vocabularies(),
        padding=model.padding(),
        packing=model.packing(),
        from_activations=from_activations,
        names=names,
        retrieval=retrieval,
        row_proof=_row_proof(folder),
    )


def _row_proof(folder: Path) -> RowProofEntry:
    (meta_graph,) = saved_model_pb2.SavedModel.FromString((folder / GRAPH_FILE).read_bytes()).meta_graphs
    reasons = {name: prove(meta_graph, name, is_export=True).reason for name in sorted(meta_graph.signature_def)}
    return RowProofEntry(version=VERSION, sha256="", reasons=reasons)


def _check_finite(variable: Any) -> None:
    if not isinstance(variable, tf.Variable) or not variable.dtype.is_floating:
        return
    bad = tf.logical_not(tf.math.is_finite(variable))
    if count := int(tf.math.count_nonzero(bad)):
        place = tf.where(bad)[0].numpy().tolist()
        raise ExportError(
            f"weight {variable.name!r}: value {place} is {float(variable.numpy()[tuple(place)])}, and {count} of "
            f"{variable.shape.num_elements()} values are not finite. Find out why training produced this value. To export "
            "it all the same, turn require_finite off."
        )


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn TensorFlow's error of a disk into an ExportError."""
    try:
        yield
    except tf.errors.OpError as error:
        text = " ".join(error.message.split())
        raise ExportError(
            f"{folder}: TensorFlow cannot write the graph: {text}. Free space or repair the disk."
        ) from None


def _save(root: Any, folder: Path, signatures: Mapping[str, Any]) -> None:
    try:
        tf.saved_model.save(root, str(folder), signatures=signatures)
    except (OSError, tf.errors.OpError):  # an error of the disk
        raise
    except Exception as error:  # TensorFlow raises no common type for a function that it cannot save
        hint = ""
        if "untracked" in str(error):
            hint = (
                " A function of the model uses a variable that is not part of the export. Read "
                "layer.embedding_tables in the call of a layer, without a tf.function of its own."
            )
        raise ExportError(f"model: TensorFlow cannot save it: {one_line(error).removesuffix('.')}.{hint}") from error


def _restore_nothing(folder: Path) -> None:
    """Remove the restore step from a graph whose variables have no values. It would take a fifth of the load time."""
    path = folder / GRAPH_FILE
    saved = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    for meta_graph in saved.meta_graphs:
        meta_graph.ClearField("saver_def")
    replace_file(path, saved.SerializeToString(deterministic=True))


def _variable(array: ArrayPlan, layout: str) -> Any:
    dtype = tf.as_dtype(numpy_dtype(array.dtype))
    if layout == "mmap":
        return MappedTable(array.name, array.shape, dtype, array.file)
    return resource_variable_ops.UninitializedVariable(shape=array.shape, dtype=dtype, name=array.name, trainable=False)


def _functions(model: ExportableModel) -> dict[str, Any]:
    """Return the functions of all signatures but `from_activations`."""
    specs = model.input_specs()
    weighted = [feature.name for feature in model.features() if feature.weighted]
    packing = model.packing()

    @tf.function(input_signature=[specs], autograph=False)
    def serving_default(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return model(inputs)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="examples")], autograph=False)
    def serving_examples(examples: Tensor) -> dict[str, Tensor]:
        # The function, not the model: its graph is traced and saved once.
        found: dict[str, Tensor] = serving_default(parse_examples(examples, specs, weighted, model.padding()))
        return found

    functions = {"serving_default": serving_default}
    if reason := unparsable(specs):
        warn(
            f"Leaving out the signature serving_examples: tf.train.Example cannot hold the input {reason}.",
        )
    else:
        functions["serving_examples"] = serving_examples
    if not packing.left_out:

        @tf.function(input_signature=[_matrix_spec(packing)], autograph=False)
        def packed(ids: Tensor) -> dict[str, Tensor]:
            return model.packed(ids)

        functions["packed"] = packed
    return {**functions, **model.further_functions()}


def _matrix_spec(packing: Packing) -> tf.TensorSpec:
    """Return the spec int64 [batch, columns]. The width is known if there are no lists."""
    widths = [packed.columns for packed in packing.inputs]
    width = None if None in widths else sum(width or 0 for width in widths)
    return tf.TensorSpec([None, width], tf.int64, name="ids")


def _signature_of(function: Any) -> dict[str, dict[str, TensorSpec]]:
    (argument,), _ = function.structured_input_signature
    # TensorFlow renames the spec of a key that is the argument's own name.
    specs = argument if isinstance(argument, Mapping) else {argument.name: argument}
    outputs = function.structured_outputs
    return {
        "inputs": {name: _spec_of(spec) for name, spec in sorted(specs.items())},
        "outputs": {name: _spec_of(spec) for name, spec in outputs.items()},
    }


def _spec_of(spec: Any) -> TensorSpec:
    shape = None if spec.shape.rank is None else tuple(spec.shape.as_list())
    return TensorSpec(dtype=spec.dtype.name, shape=shape)
