"""Other libraries' embedding layers, with their names and meanings, on top of tpuembed's layer.

`tpuembed.compat.tfrs` replaces `tensorflow_recommenders.layers.embedding` and its experimental counterpart.
`tpuembed.compat.keras_rs` replaces `keras_rs.layers`. Code written for them runs with the import changed. Unsupported
options raise an error that names them.
"""

import importlib.util
import sys
import types
from typing import Any

from tpuembed.errors import MissingExtraError
from tpuembed.runtime.tpu import check_keras_backend

__all__ = ["module"]

check_keras_backend()  # must run before Keras imports its backend
for _package in ("tensorflow", "keras"):
    if importlib.util.find_spec(_package) is None:
        raise MissingExtraError("tpuembed.compat", _package, "tf")


def module(name: str, **names: Any) -> types.ModuleType:
    """Register a module of `names` that can be imported as `name`. Imports of another library's modules then need one change."""
    made = types.ModuleType(name, f"The names of {name.removeprefix('tpuembed.compat.')} that tpuembed supports.")
    vars(made).update(names, __all__=sorted(names))
    sys.modules[name] = made
    return made
