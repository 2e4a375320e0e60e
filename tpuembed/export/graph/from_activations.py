"""The signature `from_activations` of a whole model: its outputs, of activations that something else looked up.

The server then looks up without TensorFlow. The signature is written if the export can prove two things, and the manifest has
the reason if it cannot:

1. What is looked up are inputs of `serving_default`, as they come in. The model is traced, and the tensors that each lookup
   gets are compared with the decoded inputs: they must be the same ones. Only casts that change no id may stand between. Of names
   these are the tensors that the layer finds names in.
2. Nothing else uses these inputs. The model is traced again. Its lookups return the given activations, and stand-ins replace
   the inputs that were looked up. No output, and no operation with a side effect, may depend on a stand-in.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tpuembed.errors import ConfigError, one_line
from tpuembed.export.graph.model_inputs import InputForm
from tpuembed.export.graph.signature import check_input_names
from tpuembed.export.graph.stacked_tables import StackedTables
from tpuembed.lookup import Ids
from tpuembed.manifest import ActivationEntry, FromActivations

__all__ = ["trace_from_activations"]

Tensor = Any
Function = Any


class _TracedModel(Protocol):
    """A model over named inputs. See `KerasModel`."""

    forms: Mapping[str, InputForm]

    def input_specs(self) -> dict[str, tf.TensorSpec]: ...

    def decode(self, inputs: Mapping[str, Tensor], others: Mapping[str, Any] | None = None) -> dict[str, Any]: ...

    def outputs(self, decoded: Mapping[str, Any]) -> dict[str, Tensor]: ...


class _RefusalError(Exception):
    """The signature is left out, and the message says why."""


@dataclasses.dataclass(frozen=True)
class _LookedUp:
    """A lookup of a trace: the entry of the manifest, and the activation."""

    entry: ActivationEntry
    activation: Tensor


def trace_from_activations(model: _TracedModel, tables: StackedTables) -> tuple[FromActivations, Function | None]:
    """Return the signature for the manifest, and its function, which is not traced again. None if it is left out."""
    try:
        lookups = _traced_lookups(model, tables)
        function = _traced_function(model, tables, lookups)
    except _RefusalError as refusal:
        return FromActivations(left_out=str(refusal)), None
    entries = tuple(lookup.entry for lookup in lookups)
    return FromActivations(features=entries, whole_tables=tuple(tables.read_whole)), function


# ---- what is looked up


def _traced_lookups(model: _TracedModel, tables: StackedTables) -> list[_LookedUp]:
    """Return the lookups of a trace of `serving_default`, which is thrown away.

    Raises:
        _RefusalError: one looks up something else than an input, or in a way that the manifest cannot express.
    """
    noted: list[tuple[Ids, Tensor]] = []
    decoded: dict[str, Any] = {}

    def note(features: Sequence[Ids], look_up: Callable[[], list[Tensor]]) -> list[Tensor]:
        activations = look_up()
        noted.extend(zip(features, activations, strict=True))
        return activations

    def call(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        decoded.update(model.decode(inputs))
        with tables.answered_by(note):
            return model.outputs(decoded)

    _traced(call, model.input_specs())
    if not noted:
        raise _RefusalError("the model looks nothing up, or in a tf.function of its own")
    lookups = [_lookup(ids, activation, model, decoded) for ids, activation in noted]
    names = [name for lookup in lookups for name in _names(lookup.entry)]
    looked_up = {name for lookup in lookups for name in (lookup.entry.ids, lookup.entry.weights)}
    names += [name for name in model.input_specs() if name not in looked_up]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise _RefusalError(f"two of its inputs would be called {twice[0]!r}; give the features names of their own")
    try:
        check_input_names(names)
    except ConfigError as error:
        raise _RefusalError(one_line(error).removesuffix(".")) from None
    return lookups


def _names(entry: ActivationEntry) -> list[str]:
    return [entry.name, *([f"{entry.name}_weights"] if entry.weighted else [])]


def _lookup(ids: Ids, activation: Tensor, model: _TracedModel, decoded: Mapping[str, Any]) -> _LookedUp:
    """Return a lookup of inputs of the signature. See `_traced_lookups`."""
    config, table = ids.config, ids.config.table
    name, given, vocabulary = _name_of(ids), _given(ids), config.vocabulary
    names = "" if ids.names is None or vocabulary is None else vocabulary.dtype
    source, weights = _sources(ids, decoded)
    if not source:
        raise _RefusalError(
            f"the ids of feature {name!r} are no plain input: the model computes them, or has a tf.function of its own"
        )
    form = model.forms[source]
    is_list, policy = form.kind != "dense", config.out_of_vocabulary
    assert policy is not None, "a FeatureConfig takes its table's"
    if is_list and not config.validate_weights_and_indices:
        raise _RefusalError(f"feature {name!r} has validate_weights_and_indices=False, so -1 is one of its ids")
    for cast in _casts(_values_of(given)):
        fails_outside = (
            policy == "error" and not config.max_sequence_length and not names
        )  # of a sequence, the end is not looked up
        if not _keeps_ids(cast, is_list, fails_outside, table.vocabulary_size):
            raise _RefusalError(
                f"the ids of feature {name!r} are cast from {cast.inputs[0].dtype.name} to {cast.outputs[0].dtype.name}, which "
                "changes some; make the input int64"
            )
    if not given.dtype.is_integer and names != "string":
        raise _RefusalError(f"the ids of feature {name!r} are {given.dtype.name}; make the input int64")
    if ids.weights is not None:
        if not weights or model.forms[weights].partner != source:
            raise _RefusalError(
                f"the weights of feature {name!r} are no plain input that is known to belong to input {source!r}; call it "
                f"{source + '_weights'!r}"
            )
        if _casts(_values_of(ids.weights)):
            raise _RefusalError(f"the weights of feature {name!r} are cast; make the input float32")
        if ids.weights.dtype != tf.float32:
            raise _RefusalError(f"the weights of feature {name!r} are {ids.weights.dtype.name}; make the input float32")
    length = config.max_sequence_length
    shape = [None, *([length] if length else [])] if is_list else form.spec.shape.as_list()
    if activation.shape.as_list() != [*shape, table.dim]:
        raise _RefusalError(
            f"the activation of feature {name!r} has shape {activation.shape}, not {tf.TensorShape([*shape, table.dim])}; "
            "leave out output_shape and the shape of build()"
        )
    entry = ActivationEntry(
        name=name,
        table=table.name,
        input="ids" if is_list else "id",
        weighted=bool(weights),
        max_sequence_length=length,
        out_of_vocabulary=policy if isinstance(policy, str) else int(policy),
        combiner=table.combiner,
        names=names,
        ids=source,
        weights=weights,
    )
    return _LookedUp(entry, activation)


def _name_of(ids: Ids) -> str:
    return ids.path or ids.config.name or ids.config.table.name


def _given(ids: Ids) -> Any:
    """Return what a lookup is given: names, or ids."""
    return ids.ids if ids.names is None else ids.names


def _sources(ids: Ids, decoded: Mapping[str, Any]) -> tuple[str, str]:
    """Return the inputs that the ids and the weights are, with their values cast or not. Empty if they are none."""
    inputs = {_identity(tensor): name for name, tensor in decoded.items()}
    return inputs.get(_identity(_given(ids)), ""), "" if ids.weights is None else inputs.get(_identity(ids.weights), "")


def _identity(tensor: Any) -> tuple[Any, ...]:
    """Return what two tensors of any kind have in common if they are the same one, with its values cast or not."""
    values = _values_of(tensor)
    parts = [part for part in tf.nest.flatten(tensor, expand_composites=True) if part is not values]
    found = [_followed(values, "Identity", "Cast"), *(_followed(part, "Identity") for part in parts)]
    return tuple((id(part.graph), part.name) if tf.is_symbolic_tensor(part) else id(part) for part in found)


def _values_of(tensor: Any) -> Tensor:
    """Return the values of a sparse or ragged tensor, and a dense one itself."""
    return getattr(tensor, "values", tensor)


def _followed(tensor: Tensor, *operations: str) -> Tensor:
    """Return what `tensor` was before these operations."""
    while tf.is_symbolic_tensor(tensor) and tensor.op.type in operations:
        tensor = tensor.op.inputs[0]
    return tensor


def _casts(tensor: Tensor) -> list[Any]:
    """Return the casts that `tensor` has gone through."""
    found = []
    while (tensor := _followed(tensor, "Identity")).op.type == "Cast":
        found.append(tensor.op)
        tensor = tensor.op.inputs[0]
    return found


def _keeps_ids(cast: Any, is_list: bool, fails_outside: bool, rows: int) -> bool:
    """Return True if a lookup of ids before `cast` that fails outside its table, or agrees outside of it, finds the same rows.

    If a lookup of other ids than the table's fails, only those must be the same after the cast. Otherwise all ids must be. Lists
    also have -1.
    """
    old, new = cast.inputs[0].dtype, cast.outputs[0].dtype
    if not (old.is_integer and new.is_integer) or (is_list and new.is_unsigned):
        return False
    return (new.min <= old.min and old.max <= new.max) or (fails_outside and rows - 1 <= new.max)


# ---- the function


def _traced_function(model: _TracedModel, tables: StackedTables, lookups: Sequence[_LookedUp]) -> Function:
    """Return the function of activations.

    Raises:
        _RefusalError: it depends on the inputs that are looked up, or looks something up itself.
    """
    entries = {lookup.entry.name: lookup.entry for lookup in lookups}
    looked_up = {name for entry in entries.values() for name in (entry.ids, entry.weights) if name}
    specs = {name: spec for name, spec in model.input_specs().items() if name not in looked_up}
    for lookup in lookups:
        name = lookup.entry.name
        specs[name] = tf.TensorSpec(lookup.activation.shape, lookup.activation.dtype, name=name)
    for name in specs:
        if name not in entries and model.forms[name].partner in looked_up:
            raise _RefusalError(
                f"input {name!r} is compared with input {model.forms[name].partner!r}, which is looked up"
            )
    stand_ins: dict[str, str] = {}
    given: list[str] = []
    others: list[str] = []

    def call(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        decoded = model.decode(inputs, {name: _stand_in(model, name, stand_ins) for name in looked_up})

        def give(features: Sequence[Ids], look_up: Callable[[], list[Tensor]]) -> list[Tensor]:
            found = [_name_of(ids) for ids in features]
            if any(
                name not in entries or _is_other(entries[name], ids, _sources(ids, decoded))
                for name, ids in zip(found, features, strict=True)
            ):
                others.extend(found)
                return look_up()
            given.extend(found)
            return [inputs[name] for name in found]

        with tables.answered_by(give):
            return model.outputs(decoded)

    function = _traced(call, specs)
    if others or sorted(given) != sorted(entries):
        raise _RefusalError("the model looks up other features each time it is traced")
    if tables.are_gathered_by(function):
        raise _RefusalError("the model looks up in a tf.function of its own")
    for operation in _before(function.graph):
        if operation.name in stand_ins:
            raise _RefusalError(f"the model uses input {stand_ins[operation.name]!r} for more than the lookup")
    return function


def _is_other(entry: ActivationEntry, ids: Ids, sources: tuple[str, str]) -> bool:
    """Return True if `ids`, of the inputs `sources`, are looked up otherwise than `entry` says."""
    config = ids.config
    now = (*sources, config.table.name, config.table.combiner, config.max_sequence_length, config.out_of_vocabulary)
    return (ids.names is not None, *now) != (
        *(bool(entry.names), entry.ids, entry.weights, entry.table, entry.combiner),
        *(entry.max_sequence_length, entry.out_of_vocabulary),
    )


def _stand_in(model: _TracedModel, name: str, stand_ins: dict[str, str]) -> Any:
    """Return a tensor in the place of input `name`, and note its operations in `stand_ins`."""

    def empty(dtype: tf.DType, shape: Sequence[int | None]) -> Tensor:
        nothing = tf.zeros([size or 0 for size in shape], dtype)
        tensor = tf.raw_ops.PlaceholderWithDefault(input=nothing, shape=shape)
        stand_ins[tensor.op.name] = name
        return tensor

    return model.forms[name].stand_in(empty)


def _before(graph: Any) -> Iterable[Any]:
    """Yield all operations that an output of a function, or an operation with a side effect, depends on."""
    pending = [*(tensor.op for tensor in graph.outputs), *graph.control_outputs]
    seen = set()
    while pending:
        operation = pending.pop()
        if operation.name not in seen:
            seen.add(operation.name)
            yield operation
            pending += [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]


def _traced(call: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], specs: Mapping[str, tf.TensorSpec]) -> Function:
    """Return `call` as a function of inputs of `specs`.

    Raises:
        _RefusalError: it failed.
    """

    @tf.function(input_signature=[dict(specs)], autograph=False)
    def from_activations(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return call(inputs)

    try:
        return from_activations.get_concrete_function()
    except Exception as error:  # whatever a model raises
        raise _RefusalError(f"its trace failed: {one_line(error).removesuffix('.')}") from None
