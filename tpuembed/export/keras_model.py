"""The functions of a whole-model export: a Keras model built without tables, its named inputs in, its outputs out."""

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tpuembed.config import ServingConfig, ServingFeature
from tpuembed.config.checks import did_you_mean
from tpuembed.config.structure import flatten, pack_like
from tpuembed.errors import ConfigError, TpuEmbedError, one_line
from tpuembed.export.dense_weights import raw_variables
from tpuembed.export.packing import pack_inputs, unpack
from tpuembed.export.signature import check_input_names
from tpuembed.export.warmup import BATCHES, sample_inputs
from tpuembed.manifest import FeatureEntry, Packing

__all__ = ["KerasModel", "build_model", "import_factory", "wrap_model"]

Tensor = Any
Factory = Callable[[], Any]


def import_factory(name: str) -> Factory:
    """The callable that "MODULE:FACTORY" names, imported with the current directory importable.

    Raises:
        ConfigError: no such module or attribute, or the module fails to import.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"model {name!r}: expected MODULE:FACTORY, such as my_project.models:ranking_model")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script that runs when it is imported ends with sys.exit
        raise ConfigError(f"model {name!r}: module {module_name!r} cannot be imported: {one_line(error)}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"model {name!r}: {module_name} has no callable {attribute!r}; {did_you_mean(attribute, known)}"
        )
    return factory


def build_model(factory: str | Factory) -> "KerasModel":
    """Call the factory (inside `tpuembed.table_scope.deferred_tables`) and find the model's inputs.

    Raises:
        ConfigError: it fails, or returns something without named inputs.
    """
    if isinstance(factory, keras.Model):
        raise ConfigError("model: pass the function that builds the model, not a model: its tables would be in memory")
    name = factory if isinstance(factory, str) else getattr(factory, "__name__", "factory")
    call = import_factory(factory) if isinstance(factory, str) else factory
    try:
        made = call()
    except TpuEmbedError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"model {name!r}: the factory failed: {one_line(error)}") from error
    return wrap_model(made, name)


def wrap_model(made: Any, name: str) -> "KerasModel":
    """A Keras model, or (model, {input name: tf.TensorSpec}), with the names of its inputs.

    Raises:
        ConfigError: it is neither, or has no inputs to read; the message names `name`.
    """
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], keras.Model) and isinstance(made[1], Mapping):
        model, specs = made
        for key, spec in specs.items():
            if not isinstance(spec, tf.TensorSpec):
                raise ConfigError(f"model {name!r}: input {key!r}: expected a tf.TensorSpec, got {spec!r}")
        return KerasModel(model, dict(specs), {key: _InputForm(key, False, False) for key in specs}, dict)
    if not isinstance(made, keras.Model):
        raise ConfigError(f"model {name!r}: the factory returned {type(made).__name__}; return a Keras 3 model")
    if not getattr(made, "inputs", None):
        raise ConfigError(
            f"model {name!r}: a subclassed model has no inputs to read; return (model, {{name: tf.TensorSpec}}) from the factory"
        )
    return _functional(made)


def _functional(model: Any) -> "KerasModel":
    """Inputs by their keys, joined with "/" where dicts are nested; inputs in no dict by their own names."""
    structure = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    by_key = isinstance(structure, Mapping)
    named = {path if by_key else tensor.name: tensor for path, tensor in flatten(structure)}
    if len(named) < len(model.inputs):
        raise ConfigError(f"model: two of its inputs are called the same, of {', '.join(named)}; rename one")
    forms = {key: _form(key, tensor) for key, tensor in named.items()}
    specs = {key: _spec(key, tensor, forms[key]) for key, tensor in named.items()}

    def pack(values: Mapping[str, Tensor]) -> Any:
        return pack_like(structure, [values[key] for key in named])

    return KerasModel(model, specs, forms, pack)


def _form(key: str, tensor: Any) -> "_InputForm":
    width = tensor.shape[1] if len(tensor.shape) == 2 else None
    return _InputForm(key, _is(tensor, "sparse"), _is(tensor, "ragged"), width)


def _is(tensor: Any, kind: str) -> bool:
    return bool(getattr(tensor, kind, False))


def _check_vocabulary(node: Any) -> None:
    """Raise ConfigError for a Keras lookup layer that would answer "out of vocabulary" to everything, or nothing."""
    if not isinstance(node, keras.layers.StringLookup | keras.layers.IntegerLookup):
        return
    if node.vocabulary_size() <= node.num_oov_indices + 1 and not node.get_vocabulary(include_special_tokens=False):
        raise ConfigError(
            f"model: layer {node.name!r} has no vocabulary, which is no weight and not restored; give it one in the factory"
        )


class _InputForm:
    """How an input's padded matrix becomes what the model takes; `width`: of a matrix that it was built for, if known."""

    def __init__(self, name: str, sparse: bool, ragged: bool, width: int | None = None) -> None:
        self.name, self.sparse, self.ragged, self.width = name, sparse, ragged, width

    @property
    def padded(self) -> bool:
        """Whether the signature pads it with -1."""
        return self.sparse or self.ragged

    def convert(self, value: Tensor) -> Any:
        """The model's tensor of the signature's `value`."""
        if self.ragged:
            return tf.ragged.boolean_mask(value, value != -1)
        if self.sparse:
            where = tf.where(value != -1)
            return tf.SparseTensor(where, tf.gather_nd(value, where), tf.shape(value, tf.int64))
        return value


def _spec(name: str, tensor: Any, form: _InputForm) -> tf.TensorSpec:
    dtype = tf.as_dtype(tensor.dtype)
    if form.padded and not (dtype.is_integer and len(tensor.shape) == 2):
        raise ConfigError(
            f"model input {name!r}: a sparse or ragged input must hold integer ids of rank 2 to be served padded"
        )
    shape = [None, None] if form.padded else [None, *tensor.shape[1:]]
    return tf.TensorSpec(shape, tf.int64 if form.padded else dtype, name=name)


class KerasModel:
    """A callable over named tensors, the specs of its inputs, and the weights it needs.

    Attributes:
        model: the Keras model, whose embedding layers hold no tables.
    """

    def __init__(
        self, model: Any, specs: Mapping[str, tf.TensorSpec], forms: Mapping[str, _InputForm], pack: Callable[..., Any]
    ) -> None:
        self.model = model
        self._specs = {name: tf.TensorSpec(spec.shape, spec.dtype, name=name) for name, spec in specs.items()}
        self._forms, self._pack = forms, pack
        check_input_names(specs)

    def input_specs(self) -> dict[str, tf.TensorSpec]:
        """By input name."""
        return dict(self._specs)

    def samples(self) -> list[dict[str, Any]]:
        """Requests for id 0 and numbers 0, which the model answers with rows of zeros in the place of its tables'; or none.

        Called in the scope of `StackedTables.rows_of_zeros`.
        """
        if any(spec.shape.rank is None for spec in self._specs.values()):
            return []
        padded = {name: 0 for name, form in self._forms.items() if form.padded}
        widths = {name: form.width for name, form in self._forms.items() if form.width}
        requests = [sample_inputs(self._specs, padded, batch, widths) for batch in BATCHES]
        try:
            for request in requests:
                self({name: tf.constant(value, self._specs[name].dtype) for name, value in request.items()})
        except Exception as error:  # whatever a model raises
            warnings.warn(f"no requests to warm up: the model fails for zeros: {one_line(error)}", stacklevel=2)
            return []
        return requests

    def features(self) -> tuple[FeatureEntry, ...]:
        """None: which table an input is looked up in is known to the model alone."""
        return ()

    def packing(self) -> Packing:
        """How the signature `packed` takes the inputs."""
        return pack_inputs(self._specs, [name for name, form in self._forms.items() if form.padded])

    def packed(self, ids: Tensor) -> dict[str, Tensor]:
        """The outputs by name, of all inputs in one matrix."""
        return self(unpack(ids, self.packing(), self._specs))

    def make_weights(self) -> None:
        """Call a subclassed model once, in a trace that is thrown away: only then it makes its weights."""
        if not getattr(self.model, "inputs", None):
            tf.function(self, input_signature=[self._specs], autograph=False).get_concrete_function()

    def state(self, without: Sequence[Any] = ()) -> list[Any]:
        """What a saved function of the model refers to: its variables but `without`, and its preprocessing layers' hash tables.

        Raises:
            ConfigError: a preprocessing layer has no vocabulary.
        """
        below = tf.train.TrackableView(self.model).descendants()
        for node in below:
            _check_vocabulary(node)
        tables = [node for node in below if isinstance(node, tf.saved_model.experimental.TrackableResource)]
        left_out = {id(variable) for variable in without}
        variables = [variable.value for variable in self.model.variables if id(variable) not in left_out]
        return [*variables, *raw_variables(self.model), *tables]

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's outputs by name, in inference mode.

        Raises:
            ConfigError: the model's own code failed.
        """
        converted = {name: self._forms[name].convert(value) for name, value in inputs.items()}
        try:
            with tf.name_scope("model"):  # a class called _Model has no name that may stand at the root
                outputs = self.model(self._pack(converted), training=False)
        except TpuEmbedError:
            raise
        except Exception as error:
            raise ConfigError(f"model: its call failed while it was traced: {one_line(error)}") from error
        return self._named(outputs)

    def _named(self, outputs: Any) -> dict[str, Tensor]:
        if isinstance(outputs, Mapping):
            return dict(flatten(outputs))
        values: Sequence[Tensor] = outputs if isinstance(outputs, list | tuple) else [outputs]
        made = getattr(self.model, "outputs", None) or ()
        names = [tensor._keras_history.operation.name for tensor in made]
        names = names or [f"output_{index}" for index in range(len(values))]
        return dict(zip(names, values, strict=True))

    def check_serving_config(self, config: ServingConfig) -> None:
        """Raise ConfigError where `config` asks for what the model's own inputs and layers decide otherwise."""
        for name, table in config.tables.items():
            if table.combiner is not None:
                raise ConfigError(f"serving_config: table {name!r}: combiner is decided by the model's layer; drop it")
        for name, feature in config.features.items():
            if name not in self._specs:
                raise ConfigError(
                    f"serving_config: feature {name!r} is no input of the model; {did_you_mean(name, self._specs)}"
                )
            for field in ("combiner", "weighted", "max_sequence_length", "out_of_vocabulary"):
                value, default = getattr(feature, field), ServingFeature.__dataclass_fields__[field].default
                if value != default:
                    raise ConfigError(
                        f"serving_config: feature {name!r}: {field} is decided by the model's layer; drop it"
                    )
            rank = 1 if feature.input == "id" else 2
            if self._specs[name].shape.rank != rank:
                raise ConfigError(
                    f"serving_config: feature {name!r}: input {feature.input!r} has rank {rank}, "
                    f"the model's input has shape {self._specs[name].shape}; make them agree"
                )
