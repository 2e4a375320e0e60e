"""The installation: checks before a layer is built, and the variables with which TensorFlow finds a machine's TPUs."""

import dataclasses
import functools
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tpuembed.errors import ConfigError, MissingExtraError, warn

__all__ = ["TpuEnvironment", "check_environment", "check_keras_backend", "configure_tpu"]

_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu")
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
    try:
        path = str(importlib.import_module("libtpu").get_library_path())
    except ModuleNotFoundError as error:
        if error.name != "libtpu":
            raise
        raise MissingExtraError("tpuembed.configure_tpu()", "libtpu", "tpu") from None
    if not Path(path).is_file():
        raise ConfigError(
            f"tpuembed.configure_tpu(): the libtpu package says that its library is {path}. That file does not exist. Install it "
            "again: pip install --force-reinstall libtpu"
        )
    wanted = {
        "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": path,
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


def _xla_flags(given: str) -> tuple[str, dict[str, str]]:
    """Return `given` with the missing flags, and the flags it already had, by name. The name of a flag file is kept."""
    if given.strip() and not given.strip().startswith("-"):
        return given, {"TF_XLA_FLAGS": given}
    present = {flag.split("=")[0]: flag for flag in given.split()}
    missing = [flag for name, flag in _XLA_FLAGS.items() if name not in present]
    return " ".join([*given.split(), *missing]), {name: present[name] for name in _XLA_FLAGS if name in present}


def check_environment() -> None:
    """Raise ConfigError for another Keras backend, for Keras 2, and for two TensorFlow packages in one environment."""
    import keras

    check_keras_backend(keras.backend.backend())
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        raise ConfigError(
            "TF_USE_LEGACY_KERAS is set. It makes tf.keras Keras 2, but the layer is a Keras 3 layer. Unset it."
        )
    installed = _installed()
    if len(installed) > 1:
        raise ConfigError(
            f"{' and '.join(installed)} are installed together and overwrite each other's files. "
            f"Run pip uninstall -y {' '.join(installed)}, then install one of them."
        )


def check_keras_backend(name: str | None = None) -> None:
    """Raise ConfigError unless Keras' backend is TensorFlow. By default, check the environment variable."""
    name = name or os.environ.get("KERAS_BACKEND") or "tensorflow"
    if name != "tensorflow":
        raise ConfigError(f"KERAS_BACKEND is {name!r}. The layer runs on Keras' TensorFlow backend. Unset it.")


@functools.cache
def _installed() -> list[str]:
    import importlib.metadata  # this import costs more than this module's

    return [name for name in _TENSORFLOWS if any(importlib.metadata.distributions(name=name))]
