"""The reference pages of docs/ have every public name and every command."""

import ast
import re
from pathlib import Path

import click
import pytest

from tpuembed import errors
from tpuembed_cli.main import cli

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
DIRECTIVES = [
    target
    for page in sorted(REFERENCE.glob("*.md"))
    for target in re.findall(r"^\.\. (?:auto\w+|py:\w+|click):: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]


def _public_names(module: str) -> list[str]:
    """Return the `__all__` of a module, without importing it: some import TensorFlow."""
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    (names,) = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    found: list[str] = ast.literal_eval(names)
    return found


@pytest.mark.parametrize(
    "module",
    [
        "tpuembed/__init__.py",
        "tpuembed/export/__init__.py",
        "tpuembed/sizing/__init__.py",
        "tpuembed/testing/__init__.py",
        "serving/tpuembed_serving/__init__.py",
    ],
)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    package = Path(module).parts[-2] if "serving" in module else "tpuembed"
    known = {target.rpartition(".")[2] for target in DIRECTIVES if target.startswith(f"{package}.")}
    assert sorted(set(_public_names(module)) - known) == []


@pytest.mark.parametrize("module", ["tfrs", "keras_rs"])
def test_every_drop_in_name_is_in_the_reference(module: str) -> None:
    text = (REFERENCE / "compat.md").read_text(encoding="utf-8")
    assert [name for name in _public_names(f"tpuembed/compat/{module}.py") if name not in text] == []


def test_every_exception_is_in_the_reference() -> None:
    public = {name for name in errors.__all__ if name.endswith("Error")}
    assert public - {target.rpartition(".")[2] for target in DIRECTIVES} == set()


def test_every_command_is_in_the_reference() -> None:
    commands = sorted(target.rpartition(":")[2] for target in DIRECTIVES if target.startswith("tpuembed_cli."))
    assert commands == sorted(cli.list_commands(click.Context(cli)))


def test_no_name_is_described_twice() -> None:
    assert sorted(DIRECTIVES) == sorted(set(DIRECTIVES))
