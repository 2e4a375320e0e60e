"""The messages of our errors. `refused` and `said` compare each with tests/golden/messages.txt.

`pytest --update-messages` rewrites that file, which lists below each test function the messages that it meets.
tests/conftest.py calls `Messages` from pytest's hooks.
"""

import contextlib
import dataclasses
import difflib
import re
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest

__all__ = ["GOLDEN", "Messages", "begin", "current", "normalised", "parse", "refused", "render", "said"]

GOLDEN: Final = "tests/golden/messages.txt"
"""The file of all messages, below pytest's root."""

_HEAD: Final = """\
# The messages of our errors, below the test that meets them.
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


def render(entries: Mapping[str, Iterable[str]]) -> str:
    """Return the text of the file that holds `entries`: test function -> its messages, which begin with their class."""
    return _HEAD + "".join(
        f"{test}\n" + "".join(f"    {line}\n" for line in sorted(set(lines))) for test, lines in sorted(entries.items())
    )


def parse(text: str) -> dict[str, set[str]]:
    """Return the entries of a file that `render` wrote."""
    entries: dict[str, set[str]] = {}
    lines: set[str] = set()
    for line in text.split("\n"):
        if line.startswith("    "):
            lines.add(line[4:])
        elif line and not line.startswith("#"):
            lines = entries[line] = set()
    return entries


@dataclasses.dataclass
class Messages:
    """The golden's entries, and what the tests of this process met.

    Attributes:
        root: The repository.
        base: The folder of pytest's temporary folders.
        update: True if `--update-messages` is given.
        compare: False if `--no-messages` is given, for other versions of Python and of libraries.
        golden: The entries of the file.
        met: The entries of the tests of this process.
        tests: The collected tests.
        passed: Those of them that have passed.
        gone: The keys of the golden without a test.
        test: The node id of the running test.
    """

    root: Path
    base: Path
    update: bool
    compare: bool = True
    golden: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    met: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    tests: set[str] = dataclasses.field(default_factory=set)
    passed: set[str] = dataclasses.field(default_factory=set)
    gone: set[str] = dataclasses.field(default_factory=set)
    test: str = ""

    def __post_init__(self) -> None:
        if self.path.exists():
            self.golden = parse(self.path.read_text(encoding="utf-8"))

    @property
    def path(self) -> Path:
        """The golden file."""
        return self.root / GOLDEN

    def collected(self, tests: Iterable[str], arguments: Iterable[str]) -> None:
        """Note which tests there are, so that an update drops what the golden holds of tests that are gone.

        Args:
            tests: The node ids of all tests of the files that pytest read.
            arguments: pytest's paths. One with "::" names a part of a file, whose other tests stay.
        """
        parts = [argument for argument in arguments if "::" in argument]
        # A case that is named alone leaves the other cases of its function unknown: an update keeps their messages.
        self.tests = set(tests) | {f"{_function(part)}[other cases]" for part in parts if "[" in part}
        present = {_function(test) for test in self.tests}
        named = {Path(_file(part)).name for part in parts}
        whole = {file for file in map(_file, present) if Path(file).name not in named}
        self.gone = {
            key
            for key in self.golden
            if (_file(key) in whole and key not in present) or not (self.root / _file(key)).exists()
        }

    def finish(self) -> None:
        """Note that the running test has passed."""
        self.passed.add(self.test)

    def check(self, message: str) -> None:
        """Compare `message`, which begins with its class, with the golden's, or note it for the update."""
        __tracebackhide__ = True
        key = _function(self.test)
        kind, _, words = message.partition(": ")
        line = f"{kind}: {normalised(words, self.root, self.base)}"
        self.met.setdefault(key, set()).add(line)
        if self.update or not self.compare or line in self.golden.get(key, ()):
            return
        nearest = difflib.get_close_matches(line, sorted(self.golden.get(key, ())), n=1, cutoff=0)
        shown = "\n".join(word.rstrip("\n") for word in difflib.ndiff(nearest, [line]))
        pytest.fail(f"{GOLDEN} does not have this message of {key}\n{shown}\n{_COMMAND}", pytrace=False)

    def output(self) -> dict[str, Any]:
        """Return what an xdist worker hands to the controller."""
        met = {key: sorted(lines) for key, lines in self.met.items()}
        return {"met": met, "tests": sorted(self.tests), "passed": sorted(self.passed), "gone": sorted(self.gone)}

    def add(self, output: Mapping[str, Any]) -> None:
        """Take over what a worker met."""
        for key, lines in output["met"].items():
            self.met.setdefault(key, set()).update(lines)
        for name in ("tests", "passed", "gone"):
            getattr(self, name).update(output[name])

    def write(self) -> None:
        """Rewrite the golden: what tests met, and what it holds by now of tests that did not run."""
        golden = parse(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        ran = {_function(test) for test in self.tests} - {_function(test) for test in self.tests - self.passed}
        entries = {key: lines for key, lines in golden.items() if key not in ran | self.gone}
        for key, lines in self.met.items():
            entries[key] = entries.get(key, set()) | lines
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(render(entries), encoding="utf-8")


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


def _function(test: str) -> str:
    """Return the node id of the function that `test` is a case of."""
    return test.partition("[")[0]


def _file(test: str) -> str:
    return test.partition("::")[0]
