"""Sets the environment variables with which TensorFlow finds a machine's TPUs, before TensorFlow is imported."""

import dataclasses
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tpuembed.errors import ConfigError, MissingExtraError, warn
from tpuembed.runtime.environment import check_keras_backend

__all__ = ["TpuEnvironment", "configure_tpu"]

_XLA_FLAGS = {
    "--tf_mlir_enable_mlir_bridge": "--tf_mlir_enable_mlir_bridge=true",
    "--tf_mlir_enable_convert_control_to_data_outputs_pass": "--tf_mlir_enable_convert_control_to_data_outputs_pass=true",
    "--tf_mlir_enable_merge_control_flow_pass": "--tf_mlir_enable_merge_control_flow_pass=true",
}


@dataclasses.dataclass(frozen=True)
class TpuEnvironment:
    """The result of `configure_tpu`.

    Attributes:
        set: the variables that it set, with their values.
        kept: the variables, and flags of TF_XLA_FLAGS, that already had a value and keep it.
    """

    set: Mapping[str, str]
    kept: Mapping[str, str]


def configure_tpu() -> TpuEnvironment:
    """Set the variables that TensorFlow needs on a machine with TPUs that have SparseCores (v5p, v6e).

    It sets TF_PLUGGABLE_DEVICE_LIBRARY_PATH (from the libtpu package), PJRT_DEVICE, NEXT_PLUGGABLE_DEVICE_USE_C_API and
    TF_XLA_FLAGS. Existing values stay. A warning names those that differ from what TPUs need. In TF_XLA_FLAGS, only
    missing flags are added.

    Returns:
        The variables that were set and those that were kept.

    Raises:
        ConfigError: TensorFlow is already imported and would not see the variables, libtpu has no library, or Keras
            runs on another backend.
        MissingExtraError: libtpu is not installed.

    Source: keras-rs' tutorial "DistributedEmbedding using TPU SparseCore and TensorFlow", for TensorFlow 2.19.
    """
    if "tensorflow" in sys.modules:
        raise ConfigError(
            "tpuembed.configure_tpu(): TensorFlow is already imported and would not see the variables. Call it before "
            "`import tensorflow` and `import keras`."
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
    needed = {**_XLA_FLAGS, **wanted, "TF_XLA_FLAGS": " ".join(_XLA_FLAGS.values())}
    for name, value in (kept | kept_flags).items():
        if value not in (needed[name], name):  # a flag without a value is true
            warn(
                f"tpuembed.configure_tpu(): {name} keeps your value {value!r}. TPUs with SparseCores need {needed[name]!r}."
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
            f"tpuembed.configure_tpu(): the libtpu package says that its library is {path}. That file does not exist. Install it "
            "again: pip install --force-reinstall libtpu"
        )
    return path


def _xla_flags(given: str) -> tuple[str, dict[str, str]]:
    """Return `given` with the missing flags, and the flags it already had, by name. The name of a flag file is kept."""
    if given.strip() and not given.strip().startswith("-"):
        return given, {"TF_XLA_FLAGS": given}
    present = {flag.split("=")[0]: flag for flag in given.split()}
    missing = [flag for name, flag in _XLA_FLAGS.items() if name not in present]
    return " ".join([*given.split(), *missing]), {name: present[name] for name in _XLA_FLAGS if name in present}
