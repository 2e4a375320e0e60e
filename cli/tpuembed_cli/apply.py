"""`tpuembed apply`: makes versions of delta packages, once or as they appear."""

import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from tpuembed.errors import TpuEmbedError, printable
from tpuembed_cli.command import Command
from tpuembed_cli.options import PATH
from tpuembed_cli.output import byte_progress, print_json, with_unit

if TYPE_CHECKING:
    from tpuembed.export import ApplyReport

__all__ = ["apply"]

_MOST_SECONDS = 86_400


@click.command(
    cls=Command,
    short_help="Make a version from a delta package.",
    api_names={"trusted_key": "--trusted-key", "serving_root": "--serving-root", "sign_key": "--sign-key"},
    examples=(
        "tpuembed apply s3://bucket/deltas models/rec",
        "tpuembed apply s3://bucket/deltas models/rec --follow --keep 3 --trusted-key key",
        "tpuembed apply deltas/7 models/rec --materialise",
    ),
)
@click.argument("package", type=PATH)
@click.argument("model_dir", type=PATH)
@click.option("--follow", is_flag=True, help="Keep running, and apply each newer package as it appears.")
@click.option(
    "--poll-seconds",
    type=click.FloatRange(min=0.1),
    metavar="S",
    help="With --follow: how often to look for a newer package. Default: 5.",
)
@click.option("--materialise", is_flag=True, help="Write full versions instead of overlays that link the base's files.")
@click.option(
    "--trusted-key",
    type=PATH,
    metavar="FILE",
    help="Refuse packages that are not signed with the key in this file. Without it, any package is applied.",
)
@click.option(
    "--serving-root", metavar="ROOT", help="For layout mmap: MODEL_DIR as the server sees it. Default: its path here."
)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    metavar="N",
    help="Afterwards remove all versions but the newest N and their bases.",
)
@click.option("--quiet", "-q", is_flag=True, help="Show warnings and errors only; --json still prints.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per version on stdout.")
def apply(
    package: str,
    model_dir: str,
    follow: bool,
    poll_seconds: float | None,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Make a version in MODEL_DIR from PACKAGE and its base, which is in MODEL_DIR.

    PACKAGE is a delta package that `tpuembed export --delta-to` wrote. For a folder or URL of packages, the newest is
    applied. Servers of MODEL_DIR then load the version. SIGTERM ends --follow.
    """
    if poll_seconds is not None and not follow:
        raise click.UsageError("--poll-seconds is for --follow. Give --follow too, or leave it out.")
    if poll_seconds is not None and not poll_seconds <= _MOST_SECONDS:
        raise click.UsageError(f"--poll-seconds must be at most {_MOST_SECONDS}, got {poll_seconds}.")
    from tpuembed.export import apply_package, newest_package
    from tpuembed.export.overlay.package import read_key

    def once() -> None:
        with byte_progress("apply", quiet=quiet) as on_progress:
            report = apply_package(package, model_dir, on_progress=on_progress, **options)
        if report.is_new or not follow:
            _say(report, quiet, as_json)
        elif not quiet:
            click.echo(f"package {found}: {model_dir} has its version already. Waiting for a newer one.", err=True)

    if not follow:
        once()
        return
    if options["trusted_key"] is not None:
        read_key(options["trusted_key"])  # one that cannot be read ends the command, before it waits for a package
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    applied: str | None = None
    failed = ("", "")
    while True:
        found = ""
        try:
            newest = newest_package(package)
            found = "" if newest is None else str(newest)
            if found != applied:
                if newest is not None:
                    once()
                elif not quiet:
                    click.echo(f"package {package}: there is none. Waiting for one.", err=True)
            applied = found
        except TpuEmbedError as error:
            if failed != (found, str(error)):  # once, not at every poll
                click.echo(f"Error: {apply.with_flags(printable(str(error)))} Trying again.", err=True)
            failed = (found, str(error))
        time.sleep(poll_seconds or 5.0)


def _say(report: "ApplyReport", quiet: bool, as_json: bool) -> None:
    if as_json:
        print_json(report.to_dict())
    elif not report.is_new:
        if not quiet:
            click.echo(f"{report.path}: was made of this package already")
    elif not quiet:
        kind = "full version" if report.materialised else "overlay"
        removed = f", removed versions {', '.join(map(str, report.removed))}" if report.removed else ""
        click.echo(f"{report.path}: {kind} of base {report.base}, {with_unit(report.bytes_pulled)} pulled{removed}")
    sys.stdout.flush()
