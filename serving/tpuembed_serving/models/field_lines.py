"""Finds the lines of the fields of a message in protobuf's text format: its parser does not report them.

Source: https://protobuf.dev/reference/protobuf/textformat-spec/
"""

import collections
import re
from collections.abc import Iterator

__all__ = ["field_lines"]

_TOKEN = re.compile(
    r"""(?P<skip>\#[^\n]*|\s+|[,;]) | (?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    | (?P<word>[A-Za-z_][A-Za-z0-9_]*) | (?P<open>[{<]) | (?P<close>[}>]) | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


def field_lines(text: str) -> dict[str, int]:
    """Return the line (from 1) of each field by its path, such as `model_config_list.config[0].name`.

    `text` must have been parsed before: text in another format gives wrong lines and no error. A message field is listed by
    its name and with an index, whether it is repeated or not.
    """
    lines: dict[str, int] = {}
    scopes: list[_Scope] = [_Scope("")]
    for kind, token, line in _tokens(text):
        scope = scopes[-1]
        if kind == "word":
            scope.name(token, line, lines)
        elif kind == "open":
            scopes.append(scope.enter(line, lines))
        elif kind == "close" and len(scopes) > 1:
            scopes.pop()
    return lines


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    line = 1
    for match in _TOKEN.finditer(text):
        if match.lastgroup != "skip":
            yield str(match.lastgroup), match[0], line
        line += match[0].count("\n")


class _Scope:
    """A message that is being read. `path` is the path of its field."""

    def __init__(self, path: str) -> None:
        self._prefix = f"{path}." if path else ""
        self._field = ""
        self._counts: collections.Counter[str] = collections.Counter()

    def name(self, name: str, line: int, lines: dict[str, int]) -> None:
        """Note the line of a field's name. A value of an enumeration is noted too, and never looked up."""
        self._field = name
        lines.setdefault(f"{self._prefix}{name}", line)

    def enter(self, line: int, lines: dict[str, int]) -> "_Scope":
        """Return the scope of the field that was named last. In a list, the same field is entered again."""
        path = f"{self._prefix}{self._field}"
        indexed = f"{path}[{self._counts[self._field]}]"
        self._counts[self._field] += 1
        lines[indexed] = line
        return _Scope(indexed if self._field in _REPEATED else path)


_REPEATED = frozenset({"config", "version_labels"})
