"""The messages of our errors. `refused` and `said` compare each with tests/golden/messages.txt.

`pytest --update-messages` rewrites that file, which lists below each message the tests that meet it.
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
# Every message of our errors that a test meets, once, and below it the tests. A number after a test: which of its refusals.
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


def render(entries: Mapping[str, str]) -> str:
    """Return the text of the file that holds `entries`: test -> class and message."""
    tests: dict[str, list[str]] = {}
    for key, line in entries.items():
        tests.setdefault(line, []).append(key)
    return _HEAD + "".join(
        f"\n{line}\n" + "".join(f"    {key}\n" for key in sorted(keys)) for line, keys in sorted(tests.items())
    )


def parse(text: str) -> dict[str, str]:
    """Return the entries of a file that `render` wrote."""
    entries, message = {}, ""
    for line in text.split("\n"):
        if line.startswith("    "):
            entries[line[4:]] = message
        elif line and not line.startswith("#"):
            message = line
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
        replaced: The keys that the new file drops, unless they are in `met`.
        test: The node id of the running test.
        count: How many refusals the running test met.
    """

    root: Path
    base: Path
    update: bool
    compare: bool = True
    golden: dict[str, str] = dataclasses.field(default_factory=dict)
    met: dict[str, str] = dataclasses.field(default_factory=dict)
    replaced: set[str] = dataclasses.field(default_factory=set)
    test: str = ""
    count: int = 0

    def __post_init__(self) -> None:
        if self.path.exists():
            self.golden = parse(self.path.read_text(encoding="utf-8"))

    @property
    def path(self) -> Path:
        """The golden file."""
        return self.root / GOLDEN

    def collected(self, tests: Iterable[str], arguments: Iterable[str]) -> None:
        """Drop, in an update, what the golden holds of tests that are gone.

        Args:
            tests: The node ids of all tests of the files that pytest read.
            arguments: pytest's paths. One with "::" names a part of a file, whose other tests stay.
        """
        present = set(tests)
        parts = {Path(argument.partition("::")[0]).name for argument in arguments if "::" in argument}
        whole = {file for file in (_file(test) for test in present) if Path(file).name not in parts}
        for key in self.golden:
            file = _file(key)
            if (file in whole and _test(key) not in present) or not (self.root / file).exists():
                self.replaced.add(key)

    def start(self, test: str) -> None:
        """Count the refusals of `test` from one."""
        self.test, self.count = test, 0

    def finish(self) -> None:
        """Check, after a test that passed, that the golden holds nothing else of it."""
        left = sorted(key for key in self.golden if _test(key) == self.test and key not in self.met)
        if self.update:
            self.replaced.update(left)
        elif left and self.compare:
            pytest.fail(f"{GOLDEN} holds messages that this test does not meet: {', '.join(left)}\n{_COMMAND}", False)

    def check(self, message: str) -> None:
        """Compare `message`, which begins with its class, with the golden's, or note it for the update."""
        __tracebackhide__ = True
        self.count += 1
        key = self.test if self.count == 1 else f"{self.test} {self.count}"
        kind, _, words = message.partition(": ")
        line = f"{kind}: {normalised(words, self.root, self.base)}"
        self.met[key] = line
        if self.update or not self.compare:
            return
        if key not in self.golden:
            pytest.fail(f"{GOLDEN} has no message of {key}\n+ {line}\n{_COMMAND}", pytrace=False)
        if self.golden[key] != line:
            shown = "\n".join(word.rstrip("\n") for word in difflib.ndiff([self.golden[key]], [line]))
            pytest.fail(f"{key}: another message than in {GOLDEN}\n{shown}\n{_COMMAND}", pytrace=False)

    def output(self) -> dict[str, Any]:
        """Return what an xdist worker hands to the controller."""
        return {"met": self.met, "replaced": sorted(self.replaced)}

    def add(self, output: Mapping[str, Any]) -> None:
        """Take over what a worker met."""
        self.met.update(output["met"])
        self.replaced.update(output["replaced"])

    def write(self) -> None:
        """Rewrite the golden: what tests met, and what it holds by now of tests that did not run."""
        golden = parse(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        kept = {key: line for key, line in golden.items() if key not in self.replaced}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(render(kept | self.met), encoding="utf-8")


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


def _test(key: str) -> str:
    """Return the node id of a key, which ends with a number from the second refusal on."""
    return re.sub(r" \d+$", "", key)


def _file(test: str) -> str:
    return test.partition("::")[0]
