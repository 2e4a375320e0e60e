"""A Keras callback that exports every few epochs, or seconds, of `fit`."""

import time
from collections.abc import Mapping
from typing import Any

import keras

from tpuembed.config.checks import check_choice, check_count, check_number
from tpuembed.errors import ConfigError, TpuEmbedError, warn
from tpuembed.export.options import ExportOptions
from tpuembed.export.report import ExportReport
from tpuembed.files import FilePath, as_path
from tpuembed.live import export_saved_model

__all__ = ["ExportCallback"]

_ON_ERROR = ("raise", "warn")


class ExportCallback(keras.callbacks.Callback):
    """Exports the model that is being trained: `model.fit(..., callbacks=[ExportCallback("models/ranker")])`.

    Each export is a new version. A server that watches `model_dir` loads it without downtime.

    Args:
        model_dir: as `tpuembed.export_saved_model` takes it.
        every_epochs: export after epochs every_epochs, 2 * every_epochs, ... None, the default, is 1, or never with
            `every_seconds`.
        every_seconds: export after the first batch that ends this long after the last export, or after the start of the
            training.
        at_end: export again at the end of training, if the last epoch, or batch, was not exported.
        input_specs: for a subclassed model, which has no inputs to read: {input name: tf.TensorSpec}, or other specs
            that `export_saved_model` takes.
        on_error: "raise" ends the training with the error. "warn" continues, and tries again after the next epochs.
        options: as `tpuembed.export_saved_model` takes them, but `require_finite` is True if it is left out.

    Attributes:
        reports: an ExportReport for each export so far.

    Raises:
        ConfigError: an argument is out of range, or an option is unknown.
    """

    def __init__(
        self,
        model_dir: str | FilePath,
        every_epochs: int | None = None,
        *,
        every_seconds: float | None = None,
        at_end: bool = False,
        input_specs: Any = None,
        on_error: str = "raise",
        **options: Any,
    ) -> None:
        super().__init__()
        if every_epochs is not None:
            check_count("ExportCallback: every_epochs", every_epochs)
        if every_seconds is not None:
            check_number("ExportCallback: every_seconds", every_seconds, 0)
            if every_epochs is not None:
                raise ConfigError(
                    f"ExportCallback: every_epochs is {every_epochs} and every_seconds is {every_seconds}. Give one of both."
                )
        check_choice("ExportCallback: on_error", on_error, _ON_ERROR)
        if options.get("version") is not None:
            raise ConfigError(
                "ExportCallback: version cannot be set, because every export has its own version. Leave it out."
            )
        options = {"require_finite": True, **options}
        ExportOptions.of("ExportCallback", _export_options(options), without=("engine",))
        self.reports: list[ExportReport] = []
        self._model_dir, self._at_end = as_path(model_dir), at_end
        self._every = None if every_seconds is not None else int(every_epochs or 1)
        self._seconds, self._last = every_seconds, time.monotonic()
        self._input_specs, self._on_error, self._options = input_specs, on_error, options
        self._unexported = 0

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002 - as Keras calls it
        """Start the clock of `every_seconds`."""
        self._last = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002 - as Keras calls it
        """Export if `every_seconds` have passed."""
        if self._seconds is None:
            return
        self._unexported += 1
        if time.monotonic() - self._last >= self._seconds:
            self._export()
            self._last = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002 - as Keras calls it
        """Export if this epoch is a multiple of `every_epochs`."""
        if self._every is None:
            return
        self._unexported += 1
        if (epoch + 1) % self._every == 0:
            self._export()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002 - as Keras calls it
        """Export what was trained since the last export, if `at_end` is set."""
        if self._at_end and self._unexported:
            self._export()

    def _export(self) -> None:
        model = self.model if self._input_specs is None else (self.model, self._input_specs)
        try:
            self.reports.append(export_saved_model(model, self._model_dir, **self._options))
        except TpuEmbedError as error:
            if self._on_error == "raise":
                raise
            warn(f"ExportCallback: not exported: {error}")
        else:
            self._unexported = 0


def _export_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` without the arguments of `export_saved_model` that are not export options."""
    beside = ("serving_config", "on_progress")
    return {name: value for name, value in options.items() if name not in beside}
