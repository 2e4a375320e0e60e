"""Other libraries' embedding layers, by their names and with their meanings, over tpuembed's own layer.

`tpuembed.compat.tfrs` stands for `tensorflow_recommenders.layers.embedding` and its experimental sibling,
`tpuembed.compat.keras_rs` for `keras_rs.layers`: code written for them runs with the import changed. What they offer and
tables cannot honour is refused by name.
"""

import importlib.util
import sys
import types
from typing import Any

from tpuembed.errors import MissingExtraError
from tpuembed.runtime.environment import check_keras_backend

__all__ = ["module"]

check_keras_backend()  # Keras imports the backend that it is told to
for _package in ("tensorflow", "keras"):
    if importlib.util.find_spec(_package) is None:
        raise MissingExtraError("tpuembed.compat", _package, "tf")


def module(name: str, **names: Any) -> types.ModuleType:
    """A module of `names` that can be imported as `name`, so that imports of another library's modules need one change."""
    made = types.ModuleType(name, f"Names of {name.removeprefix('tpuembed.compat.')}, as far as they are here.")
    vars(made).update(names, __all__=sorted(names))
    sys.modules[name] = made
    return made
