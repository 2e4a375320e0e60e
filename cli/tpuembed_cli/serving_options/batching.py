"""The batching options of `tpuembed serve`. Those that TensorFlow Serving has too also take its names."""

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
        help="Always or never batch requests.  [default: batch if the graph proves that this changes no answer]",
    ),
    click.option(
        "--batching-parameters-file",
        "--batching_parameters_file",
        type=click.Path(path_type=Path),
        help="TensorFlow Serving's BatchingParameters; needs --enable-batching.",
    ),
    click.option(
        "--max-batch-rows",
        type=click.IntRange(min=1),
        default=512,
        show_default=True,
        help="The most rows of a batch of several requests. Batching parameters take its place.",
    ),
]


batching_options = option_group(_OPTIONS)


def take_batching(options: dict[str, Any]) -> Any:
    """Remove the batching options from `options` and return them as `tpuembed_serving.settings.BatchingSettings`.

    Raises:
        ConfigError: the file is invalid, or batching is not enabled.
    """
    from tpuembed_serving.batching.parameters import read_parameters
    from tpuembed_serving.settings import BatchingSettings

    file = options.pop("batching_parameters_file")
    return BatchingSettings(
        enabled=options.pop("enable_batching"),
        parameters=None if file is None else read_parameters(file),
        max_rows=options.pop("max_batch_rows"),
    )
