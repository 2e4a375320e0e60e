"""`tpuembed`: the group of commands. The module of a command is imported when the command runs."""

import difflib
import importlib
import io
import os
import sys
import warnings
from typing import Any, TextIO

import click

import tpuembed
from tpuembed.errors import TpuEmbedError, printable
from tpuembed_cli.command import Command

__all__ = ["cli", "main"]

_COMMANDS = {
    "demo": "tpuembed_cli.demo:demo",
    "compact": "tpuembed_cli.versions:compact",
    "describe": "tpuembed_cli.describe:describe",
    "diff": "tpuembed_cli.diff:diff",
    "export": "tpuembed_cli.export:export",
    "head": "tpuembed_cli.head:head",
    "prune": "tpuembed_cli.versions:prune",
    "publish": "tpuembed_cli.publish:publish",
    "relocate": "tpuembed_cli.relocate:relocate",
    "rollback": "tpuembed_cli.versions:rollback",
    "serve": "tpuembed_cli.serve:serve",
    "sparsecore-limits": "tpuembed_cli.sparsecore_limits:sparsecore_limits",
    "stats": "tpuembed_cli.stats:stats",
    "verify": "tpuembed_cli.verify:verify",
    "versions": "tpuembed_cli.versions:versions",
}
_MOST_LINES = 5


class _Commands(click.Group):
    """Imports commands late, and turns a TpuEmbedError into one line and exit code 1. Bad usage is click's, and exits with 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that `args` name; see click. An unknown one is refused with the closest name."""
        close = difflib.get_close_matches(args[0], _COMMANDS, 1)
        if close and args[0] not in _COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {close[0]!r}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TpuEmbedError as error:
            raise click.ClickException(_short(self._with_flags(ctx, str(error)))) from error
        except BrokenPipeError:
            raise  # the reader of stdout has closed it, as `head` does: click exits with 1 and prints nothing
        except OSError as error:
            raise click.ClickException(_short(str(error))) from error

    def _with_flags(self, ctx: click.Context, message: str) -> str:
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        return command.with_flags(message) if isinstance(command, Command) else message


def _short(message: str) -> str:
    lines = [line for line in message.splitlines() if line.strip()]
    return "\n".join(lines[:_MOST_LINES])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(tpuembed.__version__, prog_name="tpuembed")
def cli() -> None:
    """Export embedding tables of any size from checkpoints, and serve them on CPUs."""


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as one line, like errors. The place in the code is left out."""
    del category, filename, lineno, line
    click.echo(f"Warning: {printable(' '.join(str(message).split()))}", file=file, err=True)


def main() -> None:
    """Run the console script."""
    # Set before TensorFlow is imported: hides its start-up messages.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # for characters that the terminal's encoding does not have
    warnings.showwarning = _show_warning
    try:
        cli()
    finally:
        _abandon_executions()


def _abandon_executions() -> None:
    """Do not let an abandoned execution of the server keep the process alive."""
    stopping = sys.modules.get("tpuembed_serving.workers.stopping")
    if stopping is not None:
        stopping.end_within(stopping.LAST_SECONDS)


if __name__ == "__main__":
    main()
