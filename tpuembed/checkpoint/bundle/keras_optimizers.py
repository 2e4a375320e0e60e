"""Recognises Keras' optimizers in a checkpoint by their attributes, and finds their slots.

The class of an object is not saved. An optimizer is recognised by exactly the attributes of its class. So a list of the
same name in another class (RMSprop's `_velocities`, Lion's `_momentums`) is not mistaken for a slot.

Source: keras/src/optimizers/ of Keras 3; tf_keras/src/optimizers/ of Keras 2, its optimizers that are not "legacy".
"""

from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["is_keras_3_optimizer", "is_optimizer", "legacy_slot_name", "slot_lists"]

_OPTIMIZER: Final = frozenset({"_iterations", "_variables"})
_OF_EVERY_OPTIMIZER: Final = _OPTIMIZER | {
    "_accumulated_gradients",
    "_current_learning_rate",
    "_index_dict",
    "_learning_rate",
    "_model_variables_moving_average",
    "_trainable_variables",
    "_trainable_variables_indices",
    "_velocity_hats",
    "loss_scale",
}
_SLOTS: Final[Mapping[frozenset[str], Mapping[str, str]]] = {
    frozenset(lists): lists
    for lists in (
        {"_accumulators": "accumulators"},
        {"_accumulators": "accumulators", "_linears": "linears"},
        {"_momentums": "momenta", "_velocities": "velocities"},
        {"momentums": "momenta"},
    )
}
"""Lists of Adagrad, Ftrl, Adam (AdamW, Lamb) and SGD -> the slot names of `tf.tpu.experimental.embedding`."""
_LEGACY_SLOTS: Final = {
    "accumulator": "accumulators",
    "linear": "linears",
    "m": "momenta",
    "momentum": "momenta",
    "v": "velocities",
}
_ADAMAX: Final = "Adamax"


def is_optimizer(attributes: Iterable[str]) -> bool:
    """Returns True if these are attributes of an optimizer of Keras 3, or of one of Keras 2 that is not legacy."""
    return set(attributes) >= _OPTIMIZER


def is_keras_3_optimizer(attributes: Iterable[str]) -> bool:
    """Returns True if these are attributes of an optimizer of Keras 3. Only those list the variables that they train."""
    return _OPTIMIZER | {"_trainable_variables"} <= set(attributes)


def slot_lists(attributes: Iterable[str]) -> Mapping[str, str]:
    """Return attribute -> slot name for the attributes of an optimizer that are lists of slots; empty if it is unknown."""
    return _SLOTS.get(frozenset(attributes) - _OF_EVERY_OPTIMIZER, {})


def legacy_slot_name(name: str, beside: Iterable[str], scope: str) -> str:
    """Return the slot name for `name` of a legacy optimizer of Keras 2, or of TensorFlow 1; `name` itself if it has no
    other.

    Args:
        name: the optimizer's name of the slot.
        beside: the names of all its slots: RMSprop's "momentum" is another quantity than SGD's.
        scope: the name of the slot's variable, which begins with the optimizer's: the "v" of Adamax is a maximum.
    """
    if (name == "momentum" and "rms" in beside) or (name == "v" and _ADAMAX in scope.split("/")):
        return name
    return _LEGACY_SLOTS.get(name, name)
