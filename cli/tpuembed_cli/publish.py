"""`tpuembed publish`: rows of a version to Redis."""

from pathlib import Path

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
        "tpuembed publish models/rec redis://redis.example:6379",
        "tpuembed publish models/rec rediss://tpuembed@redis.example:6380 --redis-password-file password --keep 3",
        "tpuembed publish models/rec redis://redis.example:6379 --version 7",
    ),
)
@click.argument("model_dir", type=PATH)
@click.argument("url")
@click.option(
    "--version", type=click.IntRange(min=1), metavar="N", help="The version to publish. Default: the highest."
)
@click.option("--name", metavar="NAME", help="The model's name in Redis. Default: the name of MODEL_DIR's folder.")
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="How many of the versions that were published last stay in Redis.",
)
@click.option(
    "--redis-password-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read the password from this file. Default: the variable TPUEMBED_REDIS_PASSWORD.",
)
@click.option("--rewrite", is_flag=True, help="Write all rows again, also those that Redis should have.")
@click.option("--quiet", "-q", is_flag=True, help="Show warnings and errors only; --json still prints.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def publish(
    model_dir: str,
    url: str,
    version: int | None,
    name: str | None,
    keep: int,
    redis_password_file: Path | None,
    rewrite: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Write the rows of a version in MODEL_DIR to the Redis, Redis Cluster or Valkey at URL, and make it the current version there.

    URL is redis://[USER@]HOST:PORT[/DB], or rediss:// for TLS. Rows that Redis has already are not written again: those of an
    interrupted run, of an overlay's base, and of tables that did not change.
    """
    from tpuembed.export.publish_rows import publish_rows
    from tpuembed.row_store import password_of

    with byte_progress("publish", quiet=quiet) as on_progress:
        report = publish_rows(
            model_dir,
            url,
            version=version,
            name=name,
            keep=keep,
            rewrite=rewrite,
            password=password_of(redis_password_file),
            on_progress=on_progress,
        )
    if as_json:
        print_json(report.to_dict())
    elif not quiet:
        reused = f", {with_unit(report.bytes_reused)} were there" if report.bytes_reused else ""
        removed = f", removed version {', '.join(map(str, report.removed))}" if report.removed else ""
        click.echo(
            f"{report.url} {report.model}: version {report.version}, {report.rows_written} rows, "
            f"{with_unit(report.bytes_written)} written{reused}{removed}"
        )
