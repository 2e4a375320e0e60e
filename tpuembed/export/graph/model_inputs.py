"""The inputs of a whole model: what the signature takes for each, and how it becomes what the model takes."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import keras
import tensorflow as tf

from tpuembed.config.structure import flatten, flatten_up_to
from tpuembed.errors import ConfigError

__all__ = ["InputForm", "forms_of", "with_partners"]

Tensor = Any
Padding = int | str

_FLOAT_PADDING: Final = "NaN"
_ELEMENTWISE = (keras.layers.StringLookup, keras.layers.IntegerLookup, keras.layers.Hashing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputForm:
    """One input.

    Attributes:
        name: in the signature.
        spec: what the signature takes.
        kind: what the model takes: "dense", "ragged" or "sparse".
        dtype: of the model's tensor.
        width: columns that the model was built for, if known.
        row_splits_dtype: of a ragged one.
        partner: the padded input whose values these weights belong to. Its padding decides how many of them there are.
    """

    name: str
    spec: tf.TensorSpec
    kind: str
    dtype: tf.DType
    width: int | None = None
    row_splits_dtype: tf.DType = tf.int64
    partner: str | None = None

    @property
    def padding(self) -> Padding | None:
        """Return what pads the signature's matrix: -1, "" or "NaN". It is None for a dense input."""
        if self.kind == "dense":
            return None
        if self.spec.dtype == tf.string:
            return ""
        return _FLOAT_PADDING if self.spec.dtype.is_floating else -1

    def present(self, value: Tensor) -> Tensor:
        """Returns bool [batch, hot]: which elements of the padded `value` the model's tensor has.

        A row of a ragged tensor ends behind its last element that differs from the padding: those before it keep their places.
        A sparse tensor has no element where the padding stands.
        """
        differs = ~tf.math.is_nan(value) if self.spec.dtype.is_floating else value != self.padding
        if self.kind == "sparse":
            return differs
        return tf.cumsum(tf.cast(differs, tf.int32), 1, reverse=True) > 0

    def convert(self, values: Mapping[str, Tensor], forms: Mapping[str, "InputForm"]) -> Any:
        """Returns the model's tensor of the signature's `values`. `forms` are those of all inputs."""
        value = values[self.name]
        if self.kind == "dense":
            return value
        if self.partner is None:
            mask = self.present(value)
        else:
            mask = forms[self.partner].present(values[self.partner])
            with tf.control_dependencies(self._belong(value, mask)):
                value = tf.reshape(value, tf.shape(mask))  # as it is already: the row proof does not read assertions
        if self.kind == "ragged":
            ragged = tf.ragged.boolean_mask(value, mask).with_row_splits_dtype(self.row_splits_dtype)
            return ragged.with_flat_values(self._cast(ragged.flat_values))
        where = tf.where(mask)
        return tf.SparseTensor(where, self._cast(tf.gather_nd(value, where)), tf.shape(value, tf.int64))

    def stand_in(self, empty: Callable[[tf.DType, Sequence[int | None]], Tensor]) -> Any:
        """Returns a tensor like that of `convert`, made of tensors that `empty` returns for a dtype and a shape."""
        if self.kind == "dense":
            return empty(self.dtype, self.spec.shape.as_list())
        values = empty(self.dtype, [None])
        if self.kind == "ragged":
            return tf.RaggedTensor.from_row_splits(values, empty(self.row_splits_dtype, [None]), validate=False)
        return tf.SparseTensor(empty(tf.int64, [None, 2]), values, empty(tf.int64, [2]))

    def _cast(self, values: Tensor) -> Tensor:
        if self.dtype == self.spec.dtype:
            return values
        return _checked_cast(values, self.dtype, self.name) if self.dtype.is_integer else tf.cast(values, self.dtype)

    def _belong(self, weights: Tensor, mask: Tensor) -> list[Any]:
        """Checks that there is one weight for each value of the partner, and none beside."""
        same_shape = tf.reduce_all(tf.shape(weights) == tf.shape(mask))
        text = f"input {self.name} must have as many values as {self.partner}"
        shapes = [f"{text}; their shapes are", tf.shape(weights), "and", tf.shape(mask)]
        first = tf.raw_ops.Assert(condition=same_shape, data=shapes)
        with tf.control_dependencies([first]):
            is_weight = ~tf.math.is_nan(weights)
            missing, extra = mask & ~is_weight, ~mask & is_weight & (weights != 0)
        both = [tf.math.count_nonzero(missing), tf.math.count_nonzero(extra)]
        data = [f"{text} in every row; missing are", both[0], "and too many", both[1]]
        return [tf.raw_ops.Assert(condition=tf.reduce_all(~(missing | extra)), data=data)]


def forms_of(tensors: Mapping[str, Any]) -> dict[str, InputForm]:
    """The forms of inputs by name, each given as a symbolic Keras tensor or as a spec of TensorFlow.

    Raises:
        ConfigError: a sparse or ragged input that cannot be padded.
    """
    return {name: _form(name, tensor) for name, tensor in tensors.items()}


def _form(name: str, tensor: Any) -> InputForm:
    kind = _kind(tensor)
    dtype, shape = tf.as_dtype(tensor.dtype), tf.TensorShape(tensor.shape)
    splits = tf.as_dtype(getattr(tensor, "row_splits_dtype", None) or tf.int64)
    if kind == "dense":
        # A symbolic tensor of Keras begins with the batch, whatever its size.
        dims = [None, *shape[1:]] if isinstance(tensor, keras.KerasTensor) else shape
        spec = tf.TensorSpec(dims, dtype, name=name)
        return InputForm(name=name, spec=spec, kind=kind, dtype=dtype, width=_width(shape))
    is_known = dtype.is_integer or dtype.is_floating or dtype == tf.string
    if not is_known or shape.rank != 2 or getattr(tensor, "ragged_rank", None) not in (None, 1):
        raise ConfigError(
            f"model input {name!r}: is {kind} {dtype.name} {shape}. A {kind} input can be served if it has rank 2 and holds "
            "integers, floats or strings. Make it one, or dense."
        )
    padded = tf.int64 if dtype.is_integer else tf.float32 if dtype.is_floating and dtype.size < 4 else dtype
    spec = tf.TensorSpec([None, None], padded, name=name)
    return InputForm(name=name, spec=spec, kind=kind, dtype=dtype, width=_width(shape), row_splits_dtype=splits)


def _kind(tensor: Any) -> str:
    if isinstance(tensor, tf.RaggedTensorSpec) or getattr(tensor, "ragged", False):
        return "ragged"
    return "sparse" if isinstance(tensor, tf.SparseTensorSpec) or getattr(tensor, "sparse", False) else "dense"


def _width(shape: tf.TensorShape) -> int | None:
    width: int | None = shape[1] if shape.rank == 2 else None
    return width


def with_partners(forms: Mapping[str, InputForm], model: Any, tensors: Mapping[str, Any]) -> dict[str, InputForm]:
    """`forms` whose padded floats know the values that they weigh.

    These are the ids that an embedding layer takes beside them, and else of NAME_weights the input NAME.
    """
    found = _looked_up_together(model, {id(tensor): name for name, tensor in tensors.items()})
    partnered = dict(forms)
    for name, form in forms.items():
        if form.padding == _FLOAT_PADDING:
            partner = forms.get(found.get(name, name.removesuffix("_weights")))
            if partner is not None and partner.padding not in (None, _FLOAT_PADDING):
                partnered[name] = dataclasses.replace(form, partner=partner.name)
    return partnered


def _looked_up_together(model: Any, inputs: Mapping[int, str]) -> dict[str, str]:
    """{input: input} of the weights and ids that an embedding layer of a functional model takes as they come in."""
    pairs: dict[str, str] = {}
    for layer in getattr(model, "layers", ()):
        if not (hasattr(type(layer), "embedding_tables") or hasattr(type(layer), "get_embedding_tables")):
            continue
        for node in layer._inbound_nodes:
            given = inspect.signature(layer.call).bind_partial(*node.arguments.args, **node.arguments.kwargs).arguments
            ids, weights = next(iter(given.values()), None), given.get("weights")
            for input_of_ids, weight in _together(ids, weights):
                name, partner = inputs.get(id(weight)), inputs.get(id(_source(input_of_ids)))
                if name is not None and partner is not None:
                    pairs[name] = partner
    return pairs


def _together(ids: Any, weights: Any) -> Iterable[tuple[Any, Any]]:
    if weights is None:
        return []
    try:
        return [(one, other) for _, one, other in flatten_up_to(ids, weights, "weights") if other is not None]
    except ConfigError:
        return [(one, dict(flatten(weights)).get(path)) for path, one in flatten(ids)]


def _source(tensor: Any) -> Any:
    """The tensor that a chain of lookups, which keep every value at its place, begins with."""
    operation, index, _ = getattr(tensor, "_keras_history", (None, 0, 0))
    if isinstance(operation, _ELEMENTWISE):
        return _source(operation._inbound_nodes[index].arguments.keras_tensors[0])
    return tensor


def _checked_cast(value: Tensor, dtype: tf.DType, name: str) -> Tensor:
    """Cast int64 values of the input `name` to `dtype`. A value that does not fit fails the request."""
    cast = tf.cast(value, dtype)
    message = f"Input {name} must be {dtype.name}, got values from"
    fits = tf.reduce_all(tf.cast(cast, tf.int64) == value)
    check = tf.raw_ops.Assert(condition=fits, data=[message, tf.reduce_min(value), "to", tf.reduce_max(value)])
    with tf.control_dependencies([check]):
        return tf.identity(cast)
