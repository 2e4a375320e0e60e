"""Checks of the installation before a layer is built."""

import functools
import os

from tpuembed.errors import ConfigError

__all__ = ["check_environment", "check_keras_backend"]

_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu")


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
