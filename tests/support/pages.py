"""Pages of documentation that run: their files, their commands, and the output that they print.

CONTRIBUTING.md has the convention.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from markdown_it import MarkdownIt
from markdown_it.token import Token

__all__ = ["Command", "File", "NotRun", "PageError", "Shell", "Step", "run", "steps"]

BACKGROUND_SECONDS = 120.0
_PORT = re.compile(r"(?<![\d.])850\d(?!\d)")
_NAME = re.compile(r"# ([\w./-]+\.\w+)")
_NAME_ABOVE = re.compile(r"(?:.*\n)*`([\w./-]+\.\w+)`:")
_NOT_RUN = re.compile(r"<!-- not run:(.*)-->", re.DOTALL)
_CODE = {"python": "python", "py": "python", "bash": "console", "sh": "console", "shell": "console"}
# TensorFlow writes them while it is imported, whatever TF_CPP_MIN_LOG_LEVEL is.
_LOG_LINE = re.compile(
    r"^(?:WARNING: All log messages before absl::InitializeLog\(\)|[IWE]0000 00:00:\d).*\n", re.MULTILINE
)
_ANYTHING = re.compile(r"\.{3,}")  # "0...." is a number of any digits
_ANY_LINES = r"(?:.*\n)*?"


class PageError(AssertionError):
    """A page breaks the convention, or does not do what it says."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")


@dataclass(frozen=True)
class File:
    """A block that is a file."""

    line: int
    name: str
    content: str


@dataclass(frozen=True)
class Command:
    """A command of a console block, and the lines after it."""

    line: int
    text: str
    expected: str

    @property
    def in_background(self) -> bool:
        return self.text.endswith("&") and not self.text.endswith("&&")


@dataclass(frozen=True)
class NotRun:
    """A block that is not run, and why."""

    line: int
    reason: str


Step = File | Command | NotRun


def steps(page: str) -> list[Step]:
    """Return what a page has a reader do, in its order.

    Raises:
        PageError: a block breaks the convention.
    """
    found: list[Step] = []
    tokens = MarkdownIt().parse(page)
    for index, token in enumerate(tokens):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "code_block":
            raise PageError(line, "an indented block is never run. Write it as a fence: ```console, ```python, ```text")
        if token.type == "fence":
            found += _of_fence(token, line, tokens[:index])
    return found


def _of_fence(fence: Token, line: int, before: list[Token]) -> Iterator[Step]:
    if before and before[-1].type == "html_block" and (comment := _NOT_RUN.fullmatch(before[-1].content.strip())):
        if not (reason := comment[1].strip()):
            raise PageError(line, "the block is not run, without a reason. Write <!-- not run: REASON -->")
        yield NotRun(line, reason)
        return
    language = fence.info.strip()
    if language == "console":
        yield from _commands(fence.content, line + 1)
        return
    above = before[-2].content if len(before) > 1 and before[-1].type == "paragraph_close" else ""
    name = _NAME_ABOVE.fullmatch(above) or _NAME.fullmatch(fence.content.partition("\n")[0])
    if name:
        if Path(name[1]).is_absolute() or ".." in Path(name[1]).parts:
            raise PageError(line, f"the file {name[1]} is outside of the page's folder. Name one inside")
        yield File(line, name[1], fence.content)
    elif language in _CODE:
        raise PageError(
            line,
            f"a block of {language} is neither a file nor run. Write ```{_CODE[language]}, and begin a file with # NAME; "
            "or say why: <!-- not run: REASON -->",
        )


def _commands(block: str, first_line: int) -> Iterator[Command]:
    lines = block.splitlines()
    if not lines or not lines[0].startswith("$ "):
        raise PageError(first_line, "a console block begins with a command. Begin its first line with '$ '")
    position = 0
    while position < len(lines):
        start, text = position, lines[position].removeprefix("$ ")
        while text.endswith("\\") and position + 1 < len(lines):
            position += 1
            text += "\n" + lines[position]
        position, output = position + 1, []
        while position < len(lines) and not lines[position].startswith("$ "):
            output.append(lines[position])
            position += 1
        yield Command(first_line + start, text.rstrip(), _stripped("\n".join(output)))


class Shell:
    """One bash in a page's folder, with the test's interpreter and free ports; `with` ends it and what it started."""

    def __init__(self, folder: Path) -> None:
        """Start it. What belongs to the run, such as outputs of commands, is written to a folder beside `folder`."""
        self.folder, self._own = folder, folder.with_name(folder.name + ".run")
        folder.mkdir(exist_ok=True)
        (self._own / "bin").mkdir(parents=True)
        self._ports = _free_ports()
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def _environment(self) -> dict[str, str]:
        # A checkout that is importable without being installed has no script.
        script = self._own / "bin" / "tpuembed"
        script.write_text(
            f"#!{sys.executable}\nfrom tpuembed_cli.main import main\nif __name__ == '__main__':\n    main()\n"
        )
        script.chmod(0o755)
        nowhere, local = "http://127.0.0.1:9", "127.0.0.1,localhost"
        return os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{script.parent}:{os.environ['PATH']}",
            "HOME": str(self._own),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), nowhere),
            **dict.fromkeys(("no_proxy", "NO_PROXY"), local),
        }

    def write(self, file: File) -> None:
        """Write a page's file, with the ports of this run."""
        path = self.folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._to_run(file.content), encoding="utf-8")

    def do(self, command: Command) -> None:
        """Run a command.

        Raises:
            PageError: its output differs from the page's, or it has none there and fails.
        """
        script, output = self._own / f"{command.line}.sh", self._own / f"{command.line}.out"
        script.write_text(self._to_run(command.text) + "\n", encoding="utf-8")
        code = self._ask(f". '{script}' < /dev/null > '{output}' 2>&1; echo $?")
        if command.in_background:
            self._wait(command, output, int(self._ask("echo $!")))
            return
        printed, expected = self._printed(output), command.expected
        if not code:
            raise PageError(command.line, f"{command.text}\nended the shell. It printed:\n{printed}")
        if set(expected.splitlines()) <= {"..."}:  # which says nothing: its exit code does
            if code != "0":
                raise PageError(command.line, f"{command.text}\nended with {code}, not with 0. It printed:\n{printed}")
        elif not _prints(expected, printed):
            raise _difference(command, printed)

    def _wait(self, command: Command, output: Path, pid: int) -> None:
        """Wait until a background command has printed what the page says; it may print more."""
        deadline = time.monotonic() + BACKGROUND_SECONDS
        while not _prints(command.expected, printed := self._printed(output), and_more=True):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                deadline = 0.0  # what it has printed since is the last
            if time.monotonic() > deadline:
                raise _difference(command, printed)
            time.sleep(0.05)

    def _ask(self, line: str) -> str:
        """Run a line of bash that prints one line; returns that, or "" if the shell has ended."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.write(line + "\n")
        self._bash.stdin.flush()
        return self._bash.stdout.readline().strip()

    def _to_run(self, text: str) -> str:
        return _PORT.sub(lambda port: self._ports[port[0]], text)

    def _printed(self, output: Path) -> str:
        """Return what a command has printed, with the page's ports and without TensorFlow's log lines."""
        text = _LOG_LINE.sub("", output.read_text(encoding="utf-8", errors="replace"))
        for page, free in self._ports.items():
            text = re.sub(rf"(?<!\d){free}(?!\d)", page, text)
        return _stripped(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.wait()
        for stream in (self._bash.stdin, self._bash.stdout):
            assert stream is not None
            stream.close()


def run(page: str, folder: Path) -> None:
    """Do what a page says, in `folder`.

    Raises:
        PageError: a block breaks the convention, or a command does not print what the page says.
    """
    with Shell(folder) as shell:
        for step in steps(page):
            match step:
                case File():
                    shell.write(step)
                case Command():
                    shell.do(step)
                case NotRun():
                    pass


def _prints(expected: str, printed: str, *, and_more: bool = False) -> bool:
    """Compare lines: `...` is any number of lines, or anything within one."""
    pattern = ""
    for line in expected.splitlines():
        pattern += _ANY_LINES if line.strip() == "..." else ".*?".join(map(re.escape, _ANYTHING.split(line))) + r"\n"
    return re.fullmatch(pattern + _ANY_LINES * and_more, printed + "\n" * bool(printed)) is not None


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def _difference(command: Command, printed: str) -> PageError:
    return PageError(
        command.line,
        f"{command.text}\nprinted what the page does not.\nThe page:\n{command.expected}\nThe run:\n{printed}",
    )


def _free_ports() -> dict[str, str]:
    """Return a free port for each that a page may name, 8500 to 8509."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(10)]
    free = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return {str(8500 + index): port for index, port in enumerate(free)}
