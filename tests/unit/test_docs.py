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
        "tpuembed/checkpoint/tools/__init__.py",
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
    functions = [target.rpartition(":")[2] for target in DIRECTIVES if target.startswith("tpuembed_cli.")]
    assert sorted(name.replace("_", "-") for name in functions) == sorted(cli.list_commands(click.Context(cli)))


def test_no_name_is_described_twice() -> None:
    assert sorted(DIRECTIVES) == sorted(set(DIRECTIVES))


@pytest.mark.parametrize(
    "document",
    sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")),
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    prose = re.sub(r"^ *```.*?^ *```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)\)", prose):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("name", cli.list_commands(click.Context(cli)))
def test_the_documents_have_every_command_and_option(name: str) -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    assert f"tpuembed {name}" in text
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
    assert [option for option in options if not re.search(rf"{option}(?![\w-])", text)] == []


# ---- docs/errors.md

_ROW = re.compile(r"^\| `(.+?)` \|(?: (?:\d{3} [A-Z_]+|status of the version) \|)? (.+) \|$", re.MULTILINE)


def _rows_of(sections: str) -> list[tuple[str, str]]:
    """Return (message, what to do) of the sections whose titles match."""
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    parts = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    return [row for part in parts if re.match(sections, part) for row in _ROW.findall(part)]


def _holds(line: str, message: str) -> bool:
    """Return True if a line has the parts of a message around its placeholders, in order."""
    place = 0
    for part in message.split("…"):
        place = line.find(part.strip(), place) + 1
        if not place:
            return False
    return True


def _unknown(rows: list[tuple[str, str]], text: str) -> list[str]:
    lines = text.splitlines()
    return [message for message, _ in rows if not any(_holds(line, message) for line in lines)]


def test_every_message_of_the_page_is_one_of_ours() -> None:
    golden = (ROOT / "tests" / "golden" / "messages.txt").read_text(encoding="utf-8")
    rows = _rows_of("(?!Serving requests)")
    assert len(rows) > 40
    assert _unknown(rows, golden) == []


def test_every_answer_of_the_page_is_in_the_code() -> None:
    sources = [*(ROOT / "serving").rglob("*.py"), ROOT / "tpuembed" / "lookup" / "ranges.py"]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in sources))
    rows = _rows_of("Serving requests")
    assert len(rows) > 10
    assert _unknown(rows, code) == []


def test_what_to_do_is_short() -> None:
    assert [text for _, text in _rows_of("") if len(text.split()) > 40] == []


def test_words_of_the_glossary_are_in_order() -> None:
    words = re.findall(r"^## (.+)$", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert words == sorted(words, key=str.lower)
