"""The options of `tpuembed serve` that say which requests share runs; those of TensorFlow Serving have its names too."""

from pathlib import Path
from typing import Any

import click

from tpuembed_cli.options import option_group

__all__ = ["batching_options", "take_batching"]

_OPTIONS = [
    click.option(
        "--enable-batching/--disable-batching",
        "--enable_batching/--disable_batching",
        "enable_batching",
        default=None,
        help="Whether requests of a signature share runs.  [default: where its graph proves that it changes no answer]",
    ),
    click.option(
        "--batching-parameters-file",
        "--batching_parameters_file",
        type=click.Path(path_type=Path),
        help="TensorFlow Serving's BatchingParameters; needs --enable-batching.",
    ),
    click.option(
        "--enable-per-model-batching-parameters",
        "--enable_per_model_batching_parameters",
        "per_model_batching",
        is_flag=True,
        help="Read batching_params.pbtxt in each version's folder; needs --enable-batching.",
    ),
    click.option(
        "--max-batch-rows",
        type=click.IntRange(min=1),
        default=512,
        show_default=True,
        help="Of a run that several requests share, where no parameters say it.",
    ),
]


batching_options = option_group(_OPTIONS)


def take_batching(options: dict[str, Any]) -> Any:
    """The `tpuembed_serving.settings.BatchingSettings` that `options` say, taken out of them.

    Raises:
        ConfigError: the file is not what it should be, or batching is not enabled.
    """
    from tpuembed_serving.batching.parameters import read_parameters
    from tpuembed_serving.settings import BatchingSettings

    file = options.pop("batching_parameters_file")
    return BatchingSettings(
        enabled=options.pop("enable_batching"),
        parameters=None if file is None else read_parameters(file),
        per_model=options.pop("per_model_batching"),
        max_rows=options.pop("max_batch_rows"),
    )
