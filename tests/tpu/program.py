"""A lowered program as data: its arguments, its operations, what depends on what. Standard library alone."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping

__all__ = ["Argument", "Operation", "Program"]

_NAME = re.compile(r"%[\w]+")
_RESULTS = re.compile(r"^ *((?:%\w+(?::\d+)?(?:, )?)+) = (.*)$")
_ARGUMENT = re.compile(r"(%arg\d+): (tensor<[^>]*>)(?: \{(.*?)\}(?=[,)]))?")


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of a program.

    Attributes:
        kind: its type, as `tensor<64x8xf32>`.
        updates: which result of the program is written in its place; None where none is.
    """

    name: str
    kind: str
    updates: int | None


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of the main function, with what is nested in it.

    Attributes:
        result: its name, without a number.
        text: its first line.
        operands: all names that it uses.
    """

    result: str
    text: str
    operands: tuple[str, ...]

    @property
    def target(self) -> str:
        """What a custom call calls; "" for another operation."""
        found = re.search(r"custom_call @(\w+)\(", self.text)
        return found.group(1) if found else ""

    def arguments(self) -> list[str]:
        """The operands of a custom call, in order."""
        found = re.search(r"custom_call @\w+\(([^)]*)\)", self.text)
        return _NAME.findall(found.group(1)) if found else []

    def attribute(self, name: str) -> str:
        """Of its frontend attributes."""
        found = re.search(rf'{name} = "([^"]*)"', self.text)
        return found.group(1) if found else ""

    def called(self) -> str:
        """The function that a custom call is given."""
        found = re.search(r"called_computations = \[@([\w.]+)\]", self.text)
        return found.group(1) if found else ""

    def kinds(self) -> list[str]:
        """The types of a custom call's operands."""
        found = re.search(r" : \((.*)\) -> ", self.text)
        return re.findall(r"tuple<.*?>>|tensor<[^>]*>", found.group(1)) if found else []

    def width(self) -> int:
        """Of the table that a custom call on SparseCores takes."""
        return int(re.findall(r"x(\d+)xf32", self.kinds()[5])[0])


class Program:
    """A StableHLO module."""

    def __init__(self, text: str) -> None:
        self.functions = dict(_bodies(text))
        head, *lines = self.functions["main"].splitlines()
        self.arguments = [
            Argument(name, kind, _aliased(notes or ""))
            for name, kind, notes in _ARGUMENT.findall(head.split(" -> ")[0])
        ]
        self.operations = {operation.result: operation for operation in _operations(lines)}
        self.results = _NAME.findall(next(line for line in reversed(lines) if line.startswith("    return")))

    def calls(self, target: str) -> list[Operation]:
        """All custom calls of `target`."""
        return [operation for operation in self.operations.values() if operation.target == target]

    def uses(self, kind: str) -> list[Operation]:
        """All operations whose first line has `kind` in it."""
        return [operation for operation in self.operations.values() if kind in operation.text]

    @functools.cache  # noqa: B019 - programs live as long as the check
    def reached(self, name: str) -> frozenset[str]:
        """All names that `name` depends on, itself too."""
        found, queue = {name}, [name]
        while queue:
            operation = self.operations.get(queue.pop())
            new = set(operation.operands) - found if operation else set()
            found |= new
            queue += new
        return frozenset(found)

    def updated(self) -> Mapping[str, str]:
        """Argument -> the result that is written in its place."""
        return {
            argument.name: self.results[argument.updates] for argument in self.arguments if argument.updates is not None
        }


def _bodies(text: str) -> Iterator[tuple[str, str]]:
    for found in re.finditer(r"^  func\.func (?:private )?@([\w.]+)\(.*?^  }\n", text, re.MULTILINE | re.DOTALL):
        yield found.group(1), found.group(0)


def _aliased(notes: str) -> int | None:
    found = re.search(r"tf\.aliasing_output = (\d+)", notes)
    return int(found.group(1)) if found else None


def _operations(lines: list[str]) -> Iterator[Operation]:
    """Lines of four spaces begin one; deeper ones, and what closes them, are of the last."""
    result, text = "", ""
    names: list[str] = []
    for line in [*lines, "    end"]:
        begins = line.startswith("    ") and line[4:5] not in (" ", "}", "^")
        if begins and result:
            yield Operation(result, text, tuple(names))
            result = ""
        found = _RESULTS.match(line) if begins else None
        if found:
            result, text, names = found.group(1).split(":")[0].split(",")[0], found.group(2), []
        names += _NAME.findall(found.group(2) if found else line) if result else []
