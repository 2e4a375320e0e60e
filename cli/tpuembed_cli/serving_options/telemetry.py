"""The telemetry options of `tpuembed serve`. The one that TensorFlow Serving has too also takes its name."""

import logging
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from tpuembed_cli.options import SIZE, option_group

__all__ = ["take_log", "take_telemetry", "telemetry_options"]

_OPTIONS = [
    click.option(
        "--metrics", is_flag=True, help="Metrics for Prometheus at /monitoring/prometheus/metrics, on the REST port."
    ),
    click.option(
        "--monitoring-config-file",
        "--monitoring_config_file",
        type=click.Path(path_type=Path),
        help="TensorFlow Serving's MonitoringConfig, instead of --metrics.",
    ),
    click.option(
        "--access-log",
        metavar="FILE",
        help="Append a line of JSON for every request to FILE; - is stderr.  [default: none]",
    ),
    click.option(
        "--request-log-bytes",
        type=SIZE,
        default=1 << 30,
        help="The most bytes of the files of a logging_config. The oldest are removed.  [default: 1GiB]",
    ),
    click.option(
        "--log-format",
        type=click.Choice(("text", "json")),
        default="text",
        show_default=True,
        help="The server's log on stderr: lines of text, or an object of JSON per line.",
    ),
    click.option("--verbose", "-v", is_flag=True, help="Also log debug messages, and show TensorFlow's own messages."),
    click.option("--quiet", "-q", is_flag=True, help="Log warnings and errors only."),
    click.option("--otel", is_flag=True, help="Export a trace of every request by OTLP, as the OTEL_* variables say."),
]


telemetry_options = option_group(_OPTIONS)


def take_telemetry(options: dict[str, Any]) -> Any:
    """Remove the telemetry options from `options` and return them as `tpuembed_serving.settings.TelemetrySettings`.

    Raises:
        ConfigError: the file is invalid.
    """
    from tpuembed_serving.settings import TelemetrySettings
    from tpuembed_serving.telemetry.metrics import DEFAULT_PATH
    from tpuembed_serving.telemetry.monitoring_config import read_metrics_path

    file, switch = options.pop("monitoring_config_file"), options.pop("metrics")
    if file is not None and switch:
        raise click.UsageError("--metrics and --monitoring-config-file both set the path of metrics. Leave one out.")
    path = DEFAULT_PATH if switch else None if file is None else read_metrics_path(file)
    return TelemetrySettings(
        metrics_path=path,
        access_log=options.pop("access_log"),
        traces=options.pop("otel"),
        request_log_bytes=options.pop("request_log_bytes"),
    )


def take_log(options: dict[str, Any]) -> Any:
    """Remove the options of the log from `options` and return them as `tpuembed_serving.settings.LogSettings`."""
    from tpuembed_serving.settings import LogSettings

    verbose, quiet = options.pop("verbose"), options.pop("quiet")
    if verbose and quiet:
        source = click.get_current_context().get_parameter_source
        from_flags = [source(name) is ParameterSource.COMMANDLINE for name in ("verbose", "quiet")]
        if any(from_flags) and not all(from_flags):  # a flag wins over a variable
            verbose, quiet = from_flags
    if verbose and quiet:
        raise click.UsageError("--verbose and --quiet contradict each other. Leave one out.")
    level = logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO
    return LogSettings(format=options.pop("log_format"), level=level)
