"""The objects whose methods call a layer. Neither TensorFlow nor Keras tells a layer which model it is part of."""

import sys
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

__all__ = ["callers"]

_Trackable = tf.__internal__.tracking.Trackable


def callers() -> Iterator[Any]:
    """Yield the layers and models whose methods run, the innermost first, each once."""
    frame, seen = sys._getframe(1), set[int]()
    while frame is not None:
        code = frame.f_code
        if code.co_varnames[:1] == ("self",):
            caller = frame.f_locals.get("self")
            if isinstance(caller, _Trackable) and id(caller) not in seen:
                seen.add(id(caller))
                yield caller
        frame = frame.f_back  # type: ignore[assignment]
