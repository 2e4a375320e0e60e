"""The class of every command: sections and examples in `--help`, environment variables, and flags in error messages."""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

__all__ = ["Command"]

_SERVICE_LINK = re.compile(r"(?:tcp|udp|sctp)://.+:\d+")
"""What Kubernetes and Docker set as NAME_PORT for a Service or a linked container."""


class Command(click.Command):
    """A command with examples.

    Attributes:
        examples: lines to paste, each a whole command.
        sections: titles of `--help`, and the flags of the options in each. Other options are under "Options".
        variables: the start of the names of the environment variables that set its options; empty if there are none.
        service_links: the variables that have the name of an option, and were ignored: see `parse_args`.
    """

    service_links: Sequence[str] = ()

    def __init__(
        self,
        *args: Any,
        examples: Sequence[str],
        sections: Mapping[str, Sequence[str]] | None = None,
        variables: str = "",
        api_names: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """`api_names` are names in error messages that differ from those of the options, and the flags to show for them."""
        super().__init__(*args, **options)
        self.examples, self.sections, self.variables = tuple(examples), dict(sections or {}), variables
        self._api_names = dict(api_names or {})
        if variables:
            for parameter in self.params:
                parameter.envvar = self._variable(parameter)

    def _variable(self, parameter: click.Parameter) -> str:
        name = _flag(parameter) if isinstance(parameter, click.Option) else str(parameter.name)
        return self.variables + name.lstrip("-").replace("-", "_").upper()

    def unknown_variables(self, environment: Mapping[str, str]) -> list[str]:
        """Return the variables that begin like those of the options and belong to none, each with a name that is close."""
        known = [self._variable(parameter) for parameter in self.params]
        unknown = sorted(name for name in environment if name.startswith(self.variables) and name not in known)
        close = {name: difflib.get_close_matches(name, known, 1, 0.9) for name in unknown}
        return [f"{name} (did you mean {close[name][0]}?)" if close[name] else name for name in unknown]

    def with_flags(self, message: str) -> str:
        """Return an error message with flags in place of the names of the Python API."""
        options = [one for one in self.params if isinstance(one, click.Option) and "_" in str(one.name)]
        flags = {str(one.name): _flag(one) for one in options} | self._api_names
        names = "|".join(map(re.escape, flags))
        return (
            re.sub(rf"(?<![\w./-])({names})(?:=True)?(?![\w/]|\.\w)", lambda match: flags[match[1]], message)
            if names
            else message
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; see click. An error about the value of a variable names the variable.

        For a Service called `tpuembed-serve-rest`, Kubernetes sets TPUEMBED_SERVE_REST_PORT to tcp://10.0.0.1:80. A variable
        whose name ends in _PORT and that has such a value is taken out of the environment.
        """
        ports = [self._variable(one) for one in self.params if self.variables and self._variable(one).endswith("_PORT")]
        self.service_links = [port for port in ports if _SERVICE_LINK.fullmatch(os.environ.get(port, ""))]
        for link in self.service_links:
            del os.environ[link]
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            name = error.param.name if error.param is not None else None
            if error.param is not None and name and ctx.get_parameter_source(name) is ParameterSource.ENVIRONMENT:
                error.param_hint = f"'{_flag(error.param)}' (from {error.param.envvar})"
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by sections."""
        titles = {flag: title for title, flags in self.sections.items() for flag in flags}
        records: dict[str, list[tuple[str, str]]] = {title: [] for title in (*self.sections, "Options")}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                records[titles.get(_flag(parameter), "Options")].append(record)
        for title, found in records.items():
            with formatter.section(title):
                formatter.write_dl(found)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, and how variables are named."""
        with formatter.section("Examples"):
            for line in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")
        if self.variables:
            formatter.write_paragraph()
            formatter.write_text(
                f"Each option has an environment variable: {self.variables}WORKERS for --workers. A flag wins over a variable."
            )
        super().format_epilog(ctx, formatter)


def _flag(parameter: click.Parameter) -> str:
    return parameter.opts[0]
