"""The functions of a whole-model export: a Keras model built without tables, its named inputs in, its outputs out."""

import importlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import keras
import tensorflow as tf

from tpuembed.config import ServingConfig
from tpuembed.config.checks import did_you_mean
from tpuembed.config.structure import flatten, pack_like
from tpuembed.errors import ConfigError, TpuEmbedError, one_line, warn
from tpuembed.export.graph.dense_weights import raw_variables
from tpuembed.export.graph.from_activations import trace_from_activations
from tpuembed.export.graph.model_inputs import InputForm, forms_of, with_partners
from tpuembed.export.graph.model_outputs import dense_outputs, name_outputs, numbered_by_keras
from tpuembed.export.graph.saved_model import ExportableModel
from tpuembed.export.graph.signature import check_input_names
from tpuembed.export.graph.stacked_tables import StackedTables, ran_without_rows
from tpuembed.export.graph.trained_features import check_stated, check_trained, features_of
from tpuembed.export.graph.vocabularies import compare_vocabularies, nodes_below, vocabularies_of
from tpuembed.export.graph.warmup import BATCHES, sample_inputs
from tpuembed.manifest import FromActivations, VocabularyEntry
from tpuembed.runtime.table_scope import deferred_tables
from tpuembed.vocabulary import Vocabulary

__all__ = ["KerasModel", "build_model", "check_layers", "import_factory", "wrap_model"]

Tensor = Any
Factory = Callable[[], Any]

_TRACED_BATCH: Final = 3
_SPECS: Final = (Mapping, list, tuple, tf.TypeSpec)


def import_factory(name: str) -> Factory:
    """The callable that "MODULE:FACTORY" names, imported with the current directory importable.

    Raises:
        ConfigError: no such module or attribute, or the module fails to import.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute) or "/" in module_name or module_name.endswith(".py"):
        raise ConfigError(f"model {name!r}: expected MODULE:FACTORY, such as my_project.models:ranking_model")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script that runs when it is imported ends with sys.exit
        if ran_without_rows(error):
            raise ConfigError(
                f"model {name!r}: module {module_name!r} trains or runs a model while it is imported. Put that code under "
                "if __name__ == '__main__':"
            ) from error
        raise ConfigError(f"model {name!r}: module {module_name!r} cannot be imported: {one_line(error)}") from error
    if module.__spec__ is not None and module.__spec__.origin is None:  # a namespace package
        raise ConfigError(
            f"model {name!r}: {module_name} is a folder without an __init__.py. Name a module in it, such as "
            f"{module_name}.models:{attribute}"
        )
    factory = getattr(module, attribute, None)
    if not callable(factory):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"model {name!r}: {module_name} has no callable {attribute!r}; {did_you_mean(attribute, known)}"
        )
    return factory


def build_model(factory: str | Factory, tables: StackedTables) -> "KerasModel":
    """Build the factory's model without tables: its layers look up in `tables`.

    Raises:
        ConfigError: the factory fails, or returns something without named inputs.
    """
    with deferred_tables(tables):
        model = _call(factory)
        if tables.were_asked_for or model.may_read_tables():
            model.trace()
    return model


def _call(factory: str | Factory) -> "KerasModel":
    if isinstance(factory, keras.Model):
        raise ConfigError("model: pass the function that builds the model, not a model: its tables would be in memory")
    name = factory if isinstance(factory, str) else getattr(factory, "__name__", "factory")
    call = import_factory(factory) if isinstance(factory, str) else factory
    try:
        made = call()
    except TpuEmbedError:
        raise
    except (Exception, SystemExit) as error:
        if ran_without_rows(error):
            raise ConfigError(
                f"model {name!r}: the factory trains or runs the model. It has no rows yet: only build it"
            ) from error
        raise ConfigError(f"model {name!r}: the factory failed{_place_of(error)}: {one_line(error)}") from error
    return wrap_model(made, name)


def _place_of(error: BaseException) -> str:
    """Return where in the user's own code an error was raised, or nothing if it was elsewhere."""
    paths = sysconfig.get_paths()
    others = (paths["stdlib"], paths["purelib"], paths["platlib"], str(Path(__file__).parents[2]))
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith((*others, "<"))]
    return f" at {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def wrap_model(made: Any, name: str) -> "KerasModel":
    """A Keras model, or (model, its inputs' specs), with the names of its inputs.

    Args:
        made: the model. The specs are one, or a dict or list of them, nested as the model takes its inputs.
        name: of what made it, for messages.

    Raises:
        ConfigError: it is neither, or has no inputs to read.
    """
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], keras.Model) and isinstance(made[1], _SPECS):
        model, structure = made
        tensors = _named_specs(structure, name)
    elif not isinstance(made, keras.Model):
        raise ConfigError(f"model {name!r}: the factory returned {type(made).__name__}. Return a Keras 3 model.")
    elif not getattr(made, "inputs", None):
        raise ConfigError(
            f"model {name!r}: a subclassed model does not name its inputs. Return (model, {{name: tf.TensorSpec}}) "
            "from the factory."
        )
    else:
        model, structure = made, made.inputs[0] if isinstance(made, keras.Sequential) else made.input
        tensors = _named_inputs(model, structure)
    check_layers(model)
    return KerasModel(model, with_partners(forms_of(tensors), model, tensors), structure)


def check_layers(model: Any) -> None:
    """Raise ConfigError for a layer of keras-rs itself, which holds its tables where no export finds them."""
    for node in nodes_below(model):
        kinds = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(node).__mro__]
        if ("keras_rs", "DistributedEmbedding") in kinds:
            raise ConfigError(
                f"model: layer {node.name!r} is keras_rs.layers.DistributedEmbedding, which holds its tables itself. "
                "Import keras_rs from tpuembed.compat, whose layer of that name takes the same arguments."
            )


def _named_specs(structure: Any, name: str) -> dict[str, Any]:
    """Specs by their keys, joined with "/" where dicts are nested. A spec in no dict has its own name, or its place in its list."""
    by_key = isinstance(structure, Mapping)
    named: dict[str, Any] = {}
    for path, spec in flatten(structure):
        if not isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec | tf.SparseTensorSpec):
            raise ConfigError(f"model {name!r}: input {path!r}: expected a tf.TensorSpec, got {spec!r}")
        key = path if by_key else (getattr(spec, "name", None) or path or "inputs")
        if key in named:
            raise ConfigError(f"model {name!r}: two of its inputs are called {key!r}. Rename one.")
        named[key] = spec
    return named


def _named_inputs(model: Any, structure: Any) -> dict[str, Any]:
    """Inputs by their keys, joined with "/" where dicts are nested; inputs in no dict by their own names."""
    by_key = isinstance(structure, Mapping)
    named = {path if by_key else tensor.name: tensor for path, tensor in flatten(structure)}
    if len(named) < len(model.inputs):
        raise ConfigError(f"model: two of its inputs are called the same, of {', '.join(named)}. Rename one.")
    for name in named:
        if not by_key and re.fullmatch(r"keras_tensor(_[0-9]+)?", name):
            _warn_of_number("input", name, 'Name it: keras.Input(..., name="...")')
    return named


def _warn_of_number(what: str, name: str, remedy: str) -> None:
    warn(
        f"model: Keras has numbered the {what} {name!r}. The next process may number it otherwise, and clients of its version then "
        f"do not find it. {remedy}."
    )


def _of_batch(spec: tf.TensorSpec) -> tf.TensorSpec:
    shape = [_TRACED_BATCH, *spec.shape[1:]] if spec.shape.rank and spec.shape[0] is None else spec.shape
    return tf.TensorSpec(shape, spec.dtype, name=spec.name)


class KerasModel(ExportableModel):
    """A callable over named tensors, the specs of its inputs, and the weights it needs.

    Attributes:
        model: the Keras model, whose embedding layers hold no tables.
        forms: of its inputs, by name.
    """

    def __init__(self, model: Any, forms: Mapping[str, InputForm], structure: Any) -> None:
        """Wrap `model`, which takes its inputs in the nested `structure`. `forms` are in walking order."""
        self.model = model
        self._specs = {name: form.spec for name, form in forms.items()}
        self.forms, self._structure = forms, structure
        self._vocabularies: tuple[VocabularyEntry, ...] | None = None
        check_input_names(self._specs)
        for name in numbered_by_keras(model):  # of other models the outputs are known when they are called
            _warn_of_number("output", name, "Name its layer, or give the model a dict of outputs")

    def input_specs(self) -> dict[str, tf.TensorSpec]:
        """Return the spec of each input by name."""
        return dict(self._specs)

    def padding(self) -> dict[str, int | str]:
        """Return the padding of each input that is a list, by name."""
        padding = {name: form.padding for name, form in self.forms.items()}
        return {name: value for name, value in padding.items() if value is not None}

    def samples(self, vocabularies: Mapping[str, Vocabulary]) -> list[dict[str, Any]]:
        """Return requests for id 0 and numbers 0, which the model answers with rows of zeros in the place of its tables'; or none.

        Called in the scope of `StackedTables.rows_of_zeros`. Which input takes names of which table is not known: the first
        name of a vocabulary is tried.
        """
        if any(spec.shape.rank is None for spec in self._specs.values()):
            return []
        pads = {n: 0 if self.forms[n].partner else pad for n, pad in self.padding().items()}
        widths = {name: form.width for name, form in self.forms.items() if form.width}
        fault = ""
        first = [(each.dtype, each.names([each.oov_buckets])[0]) for each in vocabularies.values() if len(each)]
        known = {
            name: value for name, spec in self._specs.items() for dtype, value in first if dtype == spec.dtype.name
        }
        for names in ({}, known) if known else ({},):
            ids = {**dict.fromkeys(pads, 0), **names}
            requests = [sample_inputs(self._specs, ids, batch, widths, pads) for batch in BATCHES]
            try:
                for request in requests:
                    self({name: tf.constant(value, self._specs[name].dtype) for name, value in request.items()})
            except Exception as error:  # whatever a model raises
                fault = fault or one_line(error)
            else:
                return requests
        warn(f"no requests to warm up: the model fails for zeros: {fault}")
        return []

    def vocabularies(self) -> tuple[VocabularyEntry, ...]:
        """Return the vocabularies of the preprocessing layers. They are read once."""
        if self._vocabularies is None:
            self._vocabularies = vocabularies_of(self.model)
        return self._vocabularies

    def compare_vocabularies(self, source: str, given: Mapping[str, Vocabulary] | None = None) -> None:
        """Compare the vocabularies, of a model that a factory made, with those of the training in `source`; see there.

        Raises:
            CheckpointMismatchError: one differs.
        """
        self._vocabularies = compare_vocabularies(self.model, source, given)

    def from_activations(self, tables: StackedTables) -> tuple[FromActivations, Any | None]:
        """Return how the signature `from_activations` takes its inputs, and its function. See `trace_from_activations`."""
        return trace_from_activations(self, tables)

    def may_read_tables(self) -> bool:
        """Returns True if the model has code of its own that could read a whole table or make weights."""
        if not getattr(self.model, "outputs", None):
            return True
        layers = self.model._flatten_layers(include_self=True)
        return any(
            type(layer).__module__.partition(".")[0] not in ("keras", "tpuembed")
            or isinstance(layer, keras.layers.Lambda)
            or not type(layer).call.__module__.startswith(("keras.", "tpuembed."))
            for layer in layers
        )

    def trace(self) -> None:
        """Call the model once, in a trace that is thrown away, before tables are planned and bound.

        A subclassed one then makes its weights, and the tables know whether they are read whole. The trace is of a fixed batch, if
        the model takes it: functions of its own that TensorFlow keeps by their inputs' shapes are traced again for the export.
        """
        specs = {name: _of_batch(spec) for name, spec in self._specs.items()}
        try:
            tf.function(self, input_signature=[specs], autograph=False).get_concrete_function()
        except TpuEmbedError:
            tf.function(self, input_signature=[self._specs], autograph=False).get_concrete_function()

    def state(self, without: Sequence[Any] = ()) -> list[Any]:
        """Return what a saved function of the model refers to: its variables except `without`, and hash tables.

        Raises:
            ConfigError: a preprocessing layer has no vocabulary.
        """
        self.vocabularies()
        tables = [
            node for node in nodes_below(self.model) if isinstance(node, tf.saved_model.experimental.TrackableResource)
        ]
        left_out = {id(variable) for variable in without}
        variables = [variable.value for variable in self.model.variables if id(variable) not in left_out]
        return [*variables, *raw_variables(self.model), *tables]

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's outputs by name, of the signature's `inputs`. See `outputs`."""
        return self.outputs(self.decode(inputs))

    def decode(self, inputs: Mapping[str, Tensor], others: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what the model takes, by input: `others`, and the rest converted from the signature's `inputs`."""
        given = others or {}
        return {
            name: given[name] if name in given else form.convert(inputs, self.forms)
            for name, form in self.forms.items()
        }

    def outputs(self, decoded: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the model's outputs by name, in inference mode, of what `decode` returns.

        Raises:
            ConfigError: the model's own code failed.
        """
        ordered = [decoded[name] for name in self.forms]
        try:
            with tf.name_scope("model"):  # a class called _Model has no name that may stand at the root
                outputs = self.model(pack_like(self._structure, ordered), training=False)
        except TpuEmbedError:
            raise
        except Exception as error:
            raise ConfigError(f"model: its call failed while it was traced: {one_line(error)}") from error
        return dense_outputs(name_outputs(self.model, outputs))

    def check_features(self, source: str, trained: Mapping[str, Any] | None, config: ServingConfig | None) -> None:
        """Compare the features of the embedding layers with those of the checkpoint and of a serving_config.

        Args:
            source: the checkpoint, for messages.
            trained: its `layer_config`.
            config: what the export was given.

        Raises:
            ConfigError: `config` asks for what the model's own inputs and layers decide otherwise.
            CheckpointMismatchError: the layers have other rules than in training, which `config` does not state.
        """
        layers = [node.checkpoint_config() for node in nodes_below(self.model) if hasattr(node, "checkpoint_config")]
        features = [feature for layer in layers for feature in features_of(layer)]
        if config is not None:
            check_stated(features, config)
            self._check_inputs(config)
        check_trained(features, features_of(trained), source, config)

    def _check_inputs(self, config: ServingConfig) -> None:
        for name, feature in config.features.items():
            if name not in self._specs:
                raise ConfigError(
                    f"serving_config: feature {name!r} is no input of the model; {did_you_mean(name, self._specs)}"
                )
            if feature.weighted:
                raise ConfigError(
                    f"serving_config: feature {name!r}: the model's inputs decide about weights. Remove weighted."
                )
            rank = 1 if feature.input == "id" else 2
            if self._specs[name].shape.rank != rank:
                raise ConfigError(
                    f"serving_config: feature {name!r}: input {feature.input!r} has rank {rank}, but the model's "
                    f"input has shape {self._specs[name].shape}. Write input: {'ids' if rank == 1 else 'id'}, or change the model."
                )
