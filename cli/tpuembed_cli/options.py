"""Option types that several commands share."""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import click

from tpuembed.errors import TpuEmbedError
from tpuembed.manifest import STORAGE_TYPES

__all__ = [
    "PATH",
    "SIZE",
    "STORAGE_TYPES",
    "ByteSize",
    "checkpoint_options",
    "complete_tables",
    "option_group",
    "options_of",
    "storage_option",
    "verbosity_options",
]

_Command = TypeVar("_Command", bound=Callable[..., Any] | click.Command)

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class ByteSize(click.ParamType[int]):
    """A number of bytes such as 512MiB, 2GB or 1048576; at least 1."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes in `value`."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([a-zA-Z]*)\s*", value)
        if not match or match[2].lower() not in _UNITS:
            self.fail(f"{value!r} is not a size. Write it as 512MiB, 2GB or a number of bytes.", param, ctx)
        size = int(Fraction(match[1]) * _UNITS[match[2].lower()])
        if size < 1:
            self.fail(f"{value!r} is not a positive size.", param, ctx)
        return size


SIZE = ByteSize()


class Base(click.ParamType[Any]):
    """A version, or "latest"."""

    name = "base"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return the number in `value`, or "latest"."""
        if value == "latest":
            return "latest"
        if not value.isdecimal():
            self.fail(f"{value!r} is no version. Write latest, or the number of a version.", param, ctx)
        return click.IntRange(1, 2**63 - 1).convert(value, param, ctx)


BASE = Base()


PATH = click.Path()
"""A path or a URL. Shells complete it as a path."""


def complete_tables(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the tables in the checkpoint or export of the command, for a shell."""
    from tpuembed.checkpoint import open_checkpoint

    try:
        with open_checkpoint(str(context.params.get("path"))) as checkpoint:
            return sorted(name for name in checkpoint.tables() if name.startswith(incomplete))
    except (TpuEmbedError, OSError):
        return []


def verbosity_options(command: _Command) -> _Command:
    """Add `--verbose` and `--quiet` to a command."""
    verbose = click.option(
        "--verbose", "-v", is_flag=True, callback=_not_both, help="Also show TensorFlow's own messages."
    )
    quiet = click.option(
        "--quiet", "-q", is_flag=True, callback=_not_both, help="Show warnings and errors only; --json still prints."
    )
    return verbose(quiet(command))


def _not_both(context: click.Context, _: click.Parameter, value: bool) -> bool:
    if value and (context.params.get("verbose") or context.params.get("quiet")):
        raise click.UsageError("--verbose and --quiet contradict each other. Leave one out.")
    return value


def _as_mapping(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    options: dict[str, str] = {}
    for value in values:
        name, equals, setting = value.partition("=")
        if not equals or not name.isidentifier() or name in options:
            raise click.BadParameter(f"{value!r}: write NAME=VALUE, each name once")
        options[name] = setting
    return options


def options_of(flag: str, argument: str, text: str) -> Callable[[_Command], _Command]:
    """Return an option for a mapping, as `open_checkpoint(path, **argument)` takes it."""
    return click.option(flag, argument, metavar="NAME=VALUE", multiple=True, callback=_as_mapping, help=text)


checkpoint_options = options_of(
    "--checkpoint-option",
    "checkpoint_options",
    "State what the checkpoint's files do not say: partition_strategy=div, or root=PATH to choose an object, such as "
    "model/query of a subclassed model. The error for a wrong PATH lists the valid ones. Repeatable.",
)


def _as_storage(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> str | dict[str, str]:
    by_table: dict[str, str] = {}
    for value in values:
        name, equals, storage = value.rpartition("=")
        if storage not in STORAGE_TYPES or (equals and not name):
            raise click.BadParameter(f"{value!r}: write one of {', '.join(STORAGE_TYPES)}, or TABLE= and one of them")
        if (name or "*") in by_table:
            raise click.BadParameter(f"{value!r}: {f'table {name!r}' if name else 'every other table'} already has one")
        by_table[name or "*"] = storage
    return by_table if by_table.keys() - {"*"} else by_table.get("*", STORAGE_TYPES[0])


storage_option = click.option(
    "--storage",
    metavar="[TABLE=]TYPE",
    multiple=True,
    callback=_as_storage,
    help=f"How rows are stored: {', '.join(STORAGE_TYPES)}. For all tables, or for TABLE. Repeatable. Default: float32.",
)
"""The `storage` of `export_saved_model`."""


def option_group(options: Sequence[Callable[..., Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds `options`, made by `click.option`, to a command, in their order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
