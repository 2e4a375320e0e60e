"""The objects whose methods call a layer. Neither TensorFlow nor Keras tells a layer which model it is part of."""

import sys
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

__all__ = ["callers", "frames"]

_Trackable = tf.__internal__.tracking.Trackable


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
