"""`--storage` of `tpuembed export`: one type for all tables, one per table, or both."""

from typing import Any

import click
import pytest
from click.testing import CliRunner

from tpuembed_cli.options import storage_option


@click.command()
@storage_option
def show(storage: Any) -> None:
    click.echo(repr(storage))


def _given(*values: str) -> list[str]:
    return [argument for value in values for argument in ("--storage", value)]


@pytest.mark.parametrize(
    ("values", "storage"),
    [
        ((), "float32"),
        (("int8",), "int8"),
        (("videos=int8",), {"videos": "int8"}),
        (("bfloat16", "videos=int8", "a=b=float32"), {"*": "bfloat16", "videos": "int8", "a=b": "float32"}),
        (("*=int8",), "int8"),
    ],
)
def test_storage_is_for_all_or_by_table(values: tuple[str, ...], storage: Any) -> None:
    done = CliRunner().invoke(show, _given(*values))
    assert (done.exit_code, done.output.strip()) == (0, repr(storage))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("int4",), "'int4': write one of float32, bfloat16, float16, int8, or TABLE= and one of them"),
        (("videos=",), "'videos=': write one of"),
        (("=int8",), "'=int8': write one of"),
        (("videos",), "'videos': write one of"),
        (("int8", "float16"), "'float16': every other table already has one"),
        (("a=int8", "a=int8"), "'a=int8': table 'a' already has one"),
    ],
)
def test_bad_usage_is_named(values: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(show, _given(*values))
    assert done.exit_code == 2
    assert message in done.output
