"""`tpuembed sparsecore-limits`: the SparseCore limits that tables and a sample of their ids need."""

import dataclasses
import logging
import warnings
from typing import TYPE_CHECKING, Any

import click

from tpuembed_cli.command import Command
from tpuembed_cli.output import print_json, table_of, to_terminal, with_unit
from tpuembed_cli.quiet import import_tensorflow, stdout_on_stderr

if TYPE_CHECKING:
    from tpuembed.sizing import SizingReport

__all__ = ["sparsecore_limits"]


@click.command(
    cls=Command,
    short_help="Estimate the SparseCore limits that tables need.",
    examples=("tpuembed sparsecore-limits features.yaml sample.npz --chips 8 --batch-size 16384",),
)
@click.argument("config", type=click.Path())
@click.argument("sample", type=click.Path())
@click.option("--chips", type=click.IntRange(1), required=True, help="TPU chips that share the tables.")
@click.option(
    "--batch-size", type=click.IntRange(1), required=True, help="Examples of one step, on all chips together."
)
@click.option(
    "--sparse-cores-per-chip", type=click.IntRange(1), default=4, show_default=True, help="4 on v5p, 2 on v6e."
)
@click.option(
    "--margin",
    type=click.FloatRange(0),
    default=0.25,
    show_default=True,
    help="Fraction to add to the maximum of the sample.",
)
@click.option("--optimizer", help="For tables without their own: sgd, adagrad, adagrad_momentum, adam or ftrl.")
@click.option("--no-stacking", is_flag=True, help="Estimate as with disable_table_stacking=True.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def sparsecore_limits(
    config: str,
    sample: str,
    chips: int,
    batch_size: int,
    sparse_cores_per_chip: int,
    margin: float,
    optimizer: str | None,
    no_stacking: bool,
    as_json: bool,
) -> None:
    """Estimate limits of ids, padding and memory on SparseCores for the tables in CONFIG, from the ids in SAMPLE.

    CONFIG is a YAML or JSON feature config. SAMPLE is a .npz with an array of ids per feature, padded with -1.
    """
    import_tensorflow()
    with stdout_on_stderr(), warnings.catch_warnings():
        # TensorFlow warns about --no-stacking, through a function that Python has deprecated.
        warnings.filterwarnings("ignore", "The 'warn' function is deprecated", DeprecationWarning)
        logging.getLogger("absl").setLevel(logging.ERROR)
        from tpuembed.config import feature_config_from_dict
        from tpuembed.config.structure import flatten
        from tpuembed.sizing import Topology, estimate, read_sample

        topology = Topology(chips, batch_size, sparse_cores_per_chip)
        features, ids = dict(flatten(feature_config_from_dict(config))), read_sample(sample)
        report = estimate(features, ids, topology, margin=margin, optimizer=optimizer, stacking=not no_stacking)
    if as_json:
        print_json(report.to_dict())
    else:
        _print(report)


def _print(report: "SizingReport") -> None:
    topology = report.topology
    line = (
        f"{topology.chips} chips of {topology.sparse_cores_per_chip} SparseCores, batches of {topology.batch_size}: "
        f"{with_unit(report.bytes_per_chip)} per chip; {report.steps} steps counted, margin {report.margin:g}"
    )
    to_terminal(line, table_of("tables", _rows(report.tables)), table_of("stacks", _rows(report.stacks)))
    for warning in report.warnings:
        click.echo(f"warning: {warning}")


def _rows(sizes: Any) -> list[dict[str, Any]]:
    return [{**dataclasses.asdict(size), "bytes_per_chip": with_unit(size.bytes_per_chip)} for size in sizes]
