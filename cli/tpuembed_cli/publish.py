"""`tpuembed publish`: rows of a version to Redis."""

import click

from tpuembed_cli.command import Command
from tpuembed_cli.options import PATH
from tpuembed_cli.output import byte_progress, print_json, with_unit

__all__ = ["publish"]


@click.command(
    cls=Command,
    short_help="Write the rows of a version to Redis.",
    api_names={"rewrite": "--rewrite", "keep": "--keep"},
    examples=(
        "tpuembed publish models/rec redis://redis.example:6379 fronts/rec",
        "tpuembed publish models/rec rediss://tpuembed@redis.example:6380 fronts/rec --keep 3",
        "tpuembed publish models/rec redis://redis.example:6379 fronts/rec --version 7",
    ),
)
@click.argument("model_dir", type=PATH)
@click.argument("url")
@click.argument("front_dir", type=PATH)
@click.option(
    "--version", type=click.IntRange(min=1), metavar="N", help="The version to publish. Default: the highest."
)
@click.option("--name", metavar="NAME", help="The model's name in Redis. Default: the name of FRONT_DIR's folder.")
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="How many of the versions that were published last stay in FRONT_DIR and in Redis.",
)
@click.option("--rewrite", is_flag=True, help="Write all rows again, also those that Redis should have.")
@click.option("--quiet", "-q", is_flag=True, help="Show warnings and errors only; --json still prints.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def publish(
    model_dir: str,
    url: str,
    front_dir: str,
    version: int | None,
    name: str | None,
    keep: int,
    rewrite: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Write the rows of a version in MODEL_DIR to the Redis, Redis Cluster or Valkey at URL, and FRONT_DIR/<version>: the same
    export without its tables. Serve it with tpuembed serve FRONT_DIR --row-store URL.

    URL is redis://[USER@]HOST:PORT[/DB], or rediss:// for TLS. The password is read from the variable TPUEMBED_REDIS_PASSWORD.
    Rows that Redis has already are not written again: those of an interrupted run, of an overlay's base, and of tables that did
    not change.
    """
    from tpuembed.export.publish_rows import publish_rows

    with byte_progress("publish", quiet=quiet) as on_progress:
        report = publish_rows(
            model_dir,
            url,
            front_dir,
            version=version,
            name=name,
            keep=keep,
            rewrite=rewrite,
            on_progress=on_progress,
        )
    if as_json:
        print_json(report.to_dict())
    elif not quiet:
        reused = f", {with_unit(report.bytes_reused)} were there" if report.bytes_reused else ""
        removed = f", removed version {', '.join(map(str, report.removed))}" if report.removed else ""
        click.echo(
            f"{report.path}: {report.rows_written} rows, {with_unit(report.bytes_written)} written to {report.url} as model "
            f"{report.model}{reused}{removed}"
        )
        if report.newest != report.version:
            click.echo(
                f"Servers that follow the newest version serve {report.newest}, because its number is higher.", err=True
            )
