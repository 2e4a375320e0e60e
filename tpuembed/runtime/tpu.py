"""The environment in which TensorFlow finds a machine's TPUs, to be set before TensorFlow is imported."""

import dataclasses
import importlib
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

from tpuembed.errors import ConfigError, MissingExtraError
from tpuembed.runtime.environment import check_keras_backend

__all__ = ["TpuEnvironment", "configure_tpu"]

_XLA_FLAGS = {
    "--tf_mlir_enable_mlir_bridge": "--tf_mlir_enable_mlir_bridge=true",
    "--tf_mlir_enable_convert_control_to_data_outputs_pass": "--tf_mlir_enable_convert_control_to_data_outputs_pass=true",
    "--tf_mlir_enable_merge_control_flow_pass": "--tf_mlir_enable_merge_control_flow_pass=true",
}


@dataclasses.dataclass(frozen=True)
class TpuEnvironment:
    """What `configure_tpu` did.

    Attributes:
        set: variables that it set, with their values.
        kept: variables, and flags of TF_XLA_FLAGS, that had a value before and keep it.
    """

    set: Mapping[str, str]
    kept: Mapping[str, str]


def configure_tpu() -> TpuEnvironment:
    """Set the variables that TensorFlow needs on a machine with TPUs that have SparseCores (v5p, v6e).

    TF_PLUGGABLE_DEVICE_LIBRARY_PATH (from the libtpu package), PJRT_DEVICE, NEXT_PLUGGABLE_DEVICE_USE_C_API and TF_XLA_FLAGS.
    A value that is already there stays, and a warning names it where it differs from what TPUs need; to TF_XLA_FLAGS only
    missing flags are added.

    Returns:
        What was set and what was kept.

    Raises:
        ConfigError: TensorFlow is imported already and would not see the variables, libtpu has no library, or Keras runs
            on another backend.
        MissingExtraError: libtpu is not installed.

    Source: keras-rs' tutorial "DistributedEmbedding using TPU SparseCore and TensorFlow", for TensorFlow 2.19.
    """
    if "tensorflow" in sys.modules:
        raise ConfigError(
            "tpuembed.configure_tpu(): TensorFlow is already imported and would not see the variables; call it before "
            "`import tensorflow` and `import keras`"
        )
    check_keras_backend()
    wanted = {
        "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": _libtpu_path(),
        "PJRT_DEVICE": "TPU",
        "NEXT_PLUGGABLE_DEVICE_USE_C_API": "true",
    }
    kept = {name: os.environ[name] for name in wanted if name in os.environ}
    chosen = {name: value for name, value in wanted.items() if name not in kept}
    flags, kept_flags = _xla_flags(os.environ.get("TF_XLA_FLAGS", ""))
    if flags != os.environ.get("TF_XLA_FLAGS"):
        chosen["TF_XLA_FLAGS"] = flags
    os.environ.update(chosen)
    for name, value, needed in _differing(kept | kept_flags, wanted):
        warnings.warn(
            f"tpuembed.configure_tpu(): {name} stays {value!r}, as you set it; TPUs with SparseCores need {needed!r}",
            stacklevel=2,
        )
    return TpuEnvironment(chosen, kept | kept_flags)


def _libtpu_path() -> str:
    try:
        libtpu = importlib.import_module("libtpu")
    except ModuleNotFoundError as error:
        if error.name != "libtpu":
            raise
        raise MissingExtraError("tpuembed.configure_tpu()", "libtpu", "tpu") from None
    path = str(libtpu.get_library_path())
    if not Path(path).is_file():
        raise ConfigError(
            f"tpuembed.configure_tpu(): the libtpu package says that its library is {path}, and no file is there; install it "
            "again: pip install --force-reinstall libtpu"
        )
    return path


def _xla_flags(given: str) -> tuple[str, dict[str, str]]:
    """(`given` with the missing flags added, those that were there, by name). The name of a file with flags stays as it is."""
    if given.strip() and not given.strip().startswith("-"):
        return given, {"TF_XLA_FLAGS": given}
    present = {flag.split("=")[0]: flag for flag in given.split()}
    missing = [flag for name, flag in _XLA_FLAGS.items() if name not in present]
    return " ".join([*given.split(), *missing]), {name: present[name] for name in _XLA_FLAGS if name in present}


def _differing(kept: Mapping[str, str], wanted: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(name, value, needed value) of what was kept and is not what TPUs need; a flag without a value is true."""
    needed = {**_XLA_FLAGS, **wanted, "TF_XLA_FLAGS": " ".join(_XLA_FLAGS.values())}
    return [(name, value, needed[name]) for name, value in kept.items() if value not in (needed[name], name)]
