"""The messages of our errors. `refused` and `said` compare each with tests/golden/messages.txt.

`pytest --update-messages` adds what the tests that run meet. If all tests run, it also drops what none of them meets.
tests/conftest.py calls `Messages` from pytest's hooks.
"""

import contextlib
import dataclasses
import difflib
import re
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeVar

import pytest

__all__ = ["GOLDEN", "Messages", "begin", "current", "normalised", "refused", "said"]

GOLDEN: Final = "tests/golden/messages.txt"
"""The file of all messages, below pytest's root."""

_HEAD: Final = """\
# The messages of our errors.
# Written by: pytest --update-messages
"""
_COMMAND: Final = "If the message is right, run the test with --update-messages, and review the diff of " + GOLDEN

_VARYING: Final = (
    # Keras numbers its objects in the order in which a process makes them.
    (re.compile(r"(?<!layers/)\b((?:[a-z]+_)*(?:embedding|lookup)|dense|functional|keras_tensor)_\d+(?=\b|_)"), r"\1"),
    (re.compile(r"\bbucket-[0-9a-f]{12,}\b"), "BUCKET"),
    (re.compile(r"(\.staging-(?:[a-z]+-)?\d+)-[0-9a-f]{8}\b"), r"\1-ID"),
    (re.compile(r"\b(127\.0\.0\.1|localhost|\[::1?\]):\d{4,5}\b"), r"\1:PORT"),
    (re.compile(r"\b(process|pid|PID)([ =])\d+\b"), r"\1\2PID"),
    (re.compile(r"\bat 0x[0-9a-f]{6,}"), "at ADDRESS"),
    (re.compile(r"\bport \d{4,5}\b"), "port PORT"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "SHA256"),
)

E = TypeVar("E", bound=BaseException)


def normalised(message: str, root: Path, base: Path) -> str:
    """Return `message` in one line, without what differs between runs: temporary folders, ports, process ids, addresses.

    Args:
        message: The words of the error.
        root: The repository, which becomes ROOT.
        base: The folder of pytest's temporary folders. `base`/NAME, and an xdist worker's folder between them, become TMP.
    """
    message = _unwrapped(message).replace("\n", "\\n")
    temporary = re.escape(tempfile.gettempdir())
    for folder in (str(base), str(base.resolve())):
        message = re.sub(rf"{re.escape(folder)}/[\w-]+", "TMP", message)
    message = re.sub(rf"{temporary}/tmp[a-z0-9_]{{8}}\b", "TMP", message).replace(f"{root}/", "ROOT/")
    for pattern, replacement in _VARYING:
        message = pattern.sub(replacement, message)
    return message


def _unwrapped(message: str) -> str:
    """Return the words of our error, without the stack that AutoGraph and the arguments that Keras put around them."""
    while True:
        if message.startswith("in user code:"):
            found = re.search(r"^    [\w.]+: (.*)", message, re.MULTILINE | re.DOTALL)
        else:
            found = re.match(r"Exception encountered when calling .*?\x1b\[1m(.*)\x1b\[0m", message, re.DOTALL)
        if found is None:
            return message
        message = textwrap.dedent(found[1]).strip()


@dataclasses.dataclass
class Messages:
    """The golden's messages, and what the tests of this process met.

    Attributes:
        root: The repository.
        base: The folder of pytest's temporary folders.
        compare: False to accept any message: while the golden is updated, and for other versions of Python and of libraries.
        golden: The messages of the file.
        met: Those that the tests of this process met.
    """

    root: Path
    base: Path
    compare: bool = True
    golden: set[str] = dataclasses.field(default_factory=set)
    met: set[str] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        if self.path.exists():
            self.golden = set(self.path.read_text(encoding="utf-8").removeprefix(_HEAD).splitlines())

    @property
    def path(self) -> Path:
        """The golden file."""
        return self.root / GOLDEN

    def check(self, message: str) -> None:
        """Compare `message`, which begins with its class, with the golden's."""
        __tracebackhide__ = True
        kind, _, words = message.partition(": ")
        line = f"{kind}: {normalised(words, self.root, self.base)}"
        self.met.add(line)
        if not self.compare or line in self.golden:
            return
        nearest = difflib.get_close_matches(line, sorted(self.golden), n=1, cutoff=0)
        shown = "\n".join(word.rstrip("\n") for word in difflib.ndiff(nearest, [line]))
        pytest.fail(f"{GOLDEN} does not have this message\n{shown}\n{_COMMAND}", pytrace=False)

    def write(self, *, all_ran: bool) -> None:
        """Rewrite the golden with what tests met, and unless `all_ran`, what it has."""
        lines = self.met if all_ran else self.golden | self.met
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(_HEAD + "".join(f"{line}\n" for line in sorted(lines)), encoding="utf-8")


_current: list[Messages] = []


def begin(messages: Messages) -> None:
    """Make `messages` the ones that `refused` uses."""
    _current[:] = [messages]


def current() -> Messages:
    """Return the messages of this session."""
    return _current[0]


@contextlib.contextmanager
def refused(
    kind: type[E] | tuple[type[E], ...], *, match: str | re.Pattern[str] | None = None
) -> Iterator[pytest.ExceptionInfo[E]]:
    """Assert that the body raises `kind` with the message that the golden holds.

    Args:
        kind: The class, or classes.
        match: A regular expression of the object and the numbers in the message. Its words stand in the golden alone.
    """
    __tracebackhide__ = True
    with pytest.raises(kind, match=match) as raised:
        yield raised
    current().check(f"{type(raised.value).__name__}: {raised.value}")


def said(output: str) -> None:
    """Assert that `output`, of a command or a server, is the message that the golden holds.

    Args:
        output: What the command wrote, without a traceback. Its last line that begins with "Error: " begins the message. If
            there is none, all of it is the message, as in an answer of the server.
    """
    __tracebackhide__ = True
    assert "Traceback" not in output, output
    message = ("\n" + output).rpartition("\nError: ")[2].strip()
    current().check(f"Error: {message}")
