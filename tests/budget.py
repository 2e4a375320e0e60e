"""The size of the project, which may shrink and not grow: `python -m tests.budget`, a part of `make check`.

tests/budget.json has the most that each figure may be. Whoever adds more than that deletes something first. `--lower` writes the
figures of today where they are lower.
"""

import ast
import json
import sys
from pathlib import Path

import click

import tpuembed
from tpuembed_cli.main import cli

ROOT = Path(__file__).parents[1]
BUDGET = Path(__file__).with_suffix(".json")
ROOMS = ("tpuembed", "serving", "cli")
CODE = (".py", ".c", ".h", ".html", ".js", ".css", ".json", ".yaml", ".toml", ".sh")
OTHER_PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")


def figures() -> dict[str, int]:
    """Return each figure of the checkout."""
    product = [path for room in ROOMS for path in _files(room, *CODE)]
    modules = [path for path in product if path.suffix == ".py"]
    options = _options()
    return {
        "lines of the product": sum(map(_lines, product)),
        "lines of the tests": sum(map(_lines, _files("tests", ".py"))),
        "modules": len(modules),
        "lines of code of the longest module": max(map(_lines_of_code, modules)),
        "commands": len(options),
        "options": sum(options.values()),
        "options of serve": options["serve"],
        "options of export": options["export"],
        "names of tpuembed": len(tpuembed.__all__),
        "words of docs": sum(map(_words, _files("docs", ".md"))),
        "words of the other pages": sum(_words(ROOT / page) for page in OTHER_PAGES),
    }


def _files(folder: str, *suffixes: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes and path.is_file()]


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _words(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").split())


def _lines_of_code(path: Path) -> int:
    """Return the number of lines on which a statement or an expression begins or ends: not those of comments and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.expr) and id(node) not in texts)
    code = (node for node in nodes if not (isinstance(node, ast.Expr) and id(node.value) in texts))
    return len({line for node in code for line in (node.lineno, node.end_lineno)})


def _options() -> dict[str, int]:
    context, found = click.Context(cli), {}
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        found[name] = sum(isinstance(parameter, click.Option) for parameter in command.params)
    return found


def main() -> None:
    """Compare the figures with the budget; exit with 1 if one is above it."""
    budget: dict[str, int] = json.loads(BUDGET.read_text(encoding="utf-8"))
    found = figures()
    above = [name for name, value in found.items() if value > budget[name]]
    for name in above:
        print(
            f"{name}: {found[name]:,}, and tests/budget.json allows {budget[name]:,}. Delete as much as you added.",
            file=sys.stderr,
        )
    if "--lower" in sys.argv[1:]:
        lower = {name: min(value, budget[name]) for name, value in found.items()}
        BUDGET.write_text(json.dumps(lower, indent=2) + "\n", encoding="utf-8")
    sys.exit(bool(above))


if __name__ == "__main__":
    main()
