"""What the layer reads of its callers, such as Keras that saves or loads a model, through names that they do not document.

tests/contract/test_saved_models.py fails with a version that has other names.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import keras
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.saving import saving_lib
from keras.src.utils.naming import to_snake_case

from tpuembed.errors import ConfigError

__all__ = [
    "callers",
    "check_built",
    "check_state_tree",
    "exports_a_model",
    "frames",
    "hide_default_signature",
    "in_symbolic_scope",
    "weights_store",
]

_Trackable = tf.__internal__.tracking.Trackable
_EXPORTERS: Final = ("keras.src.export.", "tensorflow.python.saved_model.", "tensorflow.lite.")
_DEFAULT_SIGNATURE: Final = "_default_save_signature"
_LOOKS_FOR_A_SIGNATURE: Final = "find_function_to_export"
_LOADS_WEIGHTS: Final = "_load_state"
_SETS_STATE: Final = "set_state_tree"
_OF_STEPS: Final = ("gradient_trap", "_rows")
"""The ends of the paths of weights that hold no values."""


def frames(frame: Any = None) -> Iterator[Any]:
    """Yield frames from the inside to the outside: from `frame` on, or from the caller's caller."""
    frame = frame or sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def callers() -> Iterator[Any]:
    """Yield the layers and models whose methods run, the innermost first, each once."""
    seen = set[int]()
    for frame in frames():
        if frame.f_code.co_varnames[:1] == ("self",):
            caller = frame.f_locals.get("self")
            if isinstance(caller, _Trackable) and id(caller) not in seen:
                seen.add(id(caller))
                yield caller


def exports_a_model() -> bool:
    """Return True if an exporter of Keras or TensorFlow traces a model, which calls the caller."""
    is_in_model = False
    for frame in frames():
        is_in_model |= isinstance(frame.f_locals.get("self"), keras.Model)
        if frame.f_globals.get("__name__", "").startswith(_EXPORTERS):
            return is_in_model
    return False


def hide_default_signature(refusal: Callable[[Any], Exception | None]) -> None:
    """Make Keras offer its default signature only of models for which `refusal` returns None.

    This signature has dense inputs. `tf.saved_model.save` traces it also beside the signatures that it is given, and it has no
    option to leave it out. Where it is hidden, a save without signatures raises the error that `refusal` returns.

    Source: TFLayer in keras/src/backend/tensorflow/layer.py, tensorflow/python/saved_model/signature_serialization.py.
    """
    owner = next((each for each in keras.Model.__mro__ if _DEFAULT_SIGNATURE in vars(each)), None)
    if owner is None:
        return  # a Keras that offers no such signature
    of_keras = vars(owner)[_DEFAULT_SIGNATURE]

    def signature(model: Any) -> Any:
        error = refusal(model)
        if error is None:
            return of_keras.fget(model)
        if not any(frame.f_code.co_name == _LOOKS_FOR_A_SIGNATURE for frame in frames()):
            return None

        # TensorFlow swallows what an attribute raises, and not what a trace does.
        @tf.function(input_signature=[], autograph=False)
        def refused() -> None:
            raise error

        return refused

    setattr(owner, _DEFAULT_SIGNATURE, property(signature))


def check_built(layer: str) -> None:
    """Raise ConfigError if Keras, which loads `layer` from a file at the moment, skips weights of layers that are not built.

    Keras builds a subclassed model by a call with the saved shapes of its inputs, as dense floats. If this fails, it only warns.
    """
    root = _load()
    if root is None or not isinstance(root["saveable"], keras.layers.Layer):
        return
    if unbuilt := list(_unbuilt(root["saveable"], root["inner_path"], root["weights_store"].h5_file, set())):
        raise ConfigError(
            f"layer {layer!r}: layers {', '.join(unbuilt)} of its model are not built, so Keras would not load their weights. A "
            "file has no record of inputs that are ragged, sparse, integers or text, so Keras cannot build a subclassed model that "
            "needs them. Build the model in code, call it once, and call its load_weights with this file."
        )


def weights_store() -> Any:
    """Return what Keras reads weights from at the moment: one object for each load. None outside of a load."""
    root = _load()
    return None if root is None else root["weights_store"]


def _load() -> dict[str, Any] | None:
    """Return the locals of the function with which Keras began to load weights."""
    loading = [frame.f_locals for frame in frames() if frame.f_code.co_name == _LOADS_WEIGHTS]
    return loading[-1] if loading else None


def check_state_tree(table: str) -> None:
    """Raise ConfigError if the state that Keras assigns, as of an Orbax checkpoint, has weights that the model does not.

    Keras assigns the state by the paths of weights, and skips the others without a word.
    """
    frame = next((frame for frame in frames() if frame.f_code.co_name == _SETS_STATE), None)
    if frame is None:
        return
    model = frame.f_locals["self"]
    saved = model._flatten_nested_dict(frame.f_locals["state_tree"].get("trainable_variables", {}))
    known = {variable.path for variable in model.variables}
    if lost := [path for path in saved if path not in known and not path.endswith(_OF_STEPS)]:
        raise ConfigError(
            f"table {table!r}: the state that Keras loads has {', '.join(lost)}, and the model has no such weights. Keras "
            "could not build the model as it was saved, or its layers have other names. Name the layers, build the model in code, "
            "call and compile it, and load the state into that."
        )


def _unbuilt(held: Any, path: str, file: Any, seen: set[int]) -> Iterator[str]:
    """Yield the names of unbuilt layers below `held`. Source: `_load_state` in keras/src/saving/saving_lib.py."""
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, keras.layers.Layer):
        if not held.built and len(file.get(f"{path}/vars", ())):
            yield held.name
        children = list(saving_lib._walk_saveable(held))
    else:
        values = list(held.values() if isinstance(held, dict) else held)
        kinds = [
            to_snake_case(type(each).__name__) if isinstance(each, keras.layers.Layer) else "container"
            for each in values
        ]
        numbers = [kinds[:index].count(kind) for index, kind in enumerate(kinds)]
        children = [(f"{kind}_{n}" if n else kind, each) for kind, n, each in zip(kinds, numbers, values, strict=True)]
    for name, child in children:
        if isinstance(child, keras.layers.Layer | list | tuple | dict):
            yield from _unbuilt(child, f"{path}/{name}".lstrip("/"), file, seen)
