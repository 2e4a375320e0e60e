"""Names the outputs of a whole model, and makes them dense tensors that every client can read."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tpuembed.errors import ConfigError

__all__ = ["dense_outputs", "name_outputs", "numbered_by_keras", "symbolic_outputs"]

Tensor = Any


def name_outputs(model: Any, outputs: Any) -> list[tuple[str, Any]]:
    """Return (name, tensor) for every leaf of the output of `model`, a Keras model.

    Values of dicts are named by their keys, joined with "/". Other outputs of a functional model are named after the
    layer that makes them, and those of a sub-model with several outputs SUBMODEL/OUTPUT. Other outputs of a subclassed
    model are output_0, output_1, ... If several have the same name, they become NAME/0, NAME/1, ... in their order.

    Raises:
        ConfigError: two outputs still have the same name.
    """
    leaves = list(_leaves(outputs))
    made = list(_leaves(symbolic_outputs(model)))
    if [key for key, _ in made] == [key for key, _ in leaves]:
        names = [key or _layer_name(tensor) for key, tensor in made]
    else:
        names = [key or f"output_{index}" for index, (key, _) in enumerate(leaves)]
    numbered = _numbered(names)
    for name, count in Counter(numbered).items():
        if count > 1:
            raise ConfigError(f"model: two of its outputs are called {name!r}. Rename a layer or a key of its outputs.")
    return list(zip(numbered, (leaf for _, leaf in leaves), strict=True))


def numbered_by_keras(model: Any) -> list[str]:
    """Return the names of outputs of a functional model that have the name of a layer which Keras has numbered.

    Raises:
        ConfigError: two outputs have the same name.
    """
    made = symbolic_outputs(model)
    layers = model._flatten_layers()
    operations = [*layers, *(each for layer in layers for each in getattr(layer, "operations", ()))]
    numbered = {each.name for each in operations if _is_numbered(each.name, type(each).__name__)}
    names = zip(_leaves(made), name_outputs(model, made), strict=True)
    return [name for (key, _), (name, _) in names if not key and numbered & set(name.split("/"))]


def _is_numbered(name: str, kind: str) -> bool:
    """Return True for "two_words_3" of a class TwoWords."""
    words, _, number = name.rpartition("_")
    return number.isdecimal() and words.replace("_", "") == kind.lower().replace("_", "")


def symbolic_outputs(model: Any) -> Any:
    """Return the structure of symbolic tensors that a functional or sequential model returns; an empty list of others.

    A functional model whose class has a `call` of its own counts as others: it may return them in another order.
    """
    made = getattr(model, "outputs", None) or []
    if not type(model).call.__module__.startswith("keras."):
        return []
    if isinstance(model, keras.Sequential):
        return made[0] if len(made) == 1 else made
    return model.output if made else []


def _leaves(structure: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, leaf). A key joins the keys of dicts, and below a dict also the positions in lists, with "/"."""
    if isinstance(structure, Mapping):
        for name in sorted(structure, key=str):
            yield from _leaves(structure[name], f"{key}/{name}" if key else str(name))
    elif isinstance(structure, list | tuple):
        for index, child in enumerate(structure):
            yield from _leaves(child, f"{key}/{index}" if key else "")
    else:
        yield key, structure


def _layer_name(tensor: Any) -> str:
    operation, _, index = tensor._keras_history
    made = getattr(operation, "outputs", None) or []
    # A sub-model whose class has its own `call` may return other outputs than it was built with.
    if len(made) < 2 or not type(operation).call.__module__.startswith("keras."):
        return str(operation.name)
    inner = name_outputs(operation, symbolic_outputs(operation))
    return next(f"{operation.name}/{name}" for name, output in inner if output is made[index])


def _numbered(names: Sequence[str]) -> list[str]:
    count, seen, numbered = Counter(names), Counter[str](), []
    for name in names:
        numbered.append(f"{name}/{seen[name]}" if count[name] > 1 else name)
        seen[name] += 1
    return numbered


def dense_outputs(outputs: Sequence[tuple[str, Any]]) -> dict[str, Tensor]:
    """Return tensors by name, float16 and bfloat16 as float32, because few clients can read them.

    Raises:
        ConfigError: an output is not a tensor.
    """
    dense = {name: _as_tensor(name, value) for name, value in outputs}
    return {
        name: tf.cast(value, tf.float32) if value.dtype in (tf.float16, tf.bfloat16) else value
        for name, value in dense.items()
    }


def _as_tensor(name: str, value: Any) -> Tensor:
    if value is not None and not isinstance(value, tf.SparseTensor | tf.RaggedTensor):
        try:
            return tf.convert_to_tensor(value)
        except (TypeError, ValueError):
            pass
    raise ConfigError(
        f"model: output {name!r} is {'None' if value is None else 'a ' + type(value).__name__}, but a signature "
        "can only return tensors. Return a tensor, such as value.to_tensor() of a ragged one, or leave it out."
    )
