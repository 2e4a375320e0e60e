"""tests/support/pages.py: what a page may contain, and what fails it."""

import contextlib
import time
from pathlib import Path

import pytest

from tests.support.pages import Command, File, NotRun, PageError, run, steps


def console(*lines: str) -> str:
    return "\n".join(["```console", *lines, "```", ""])


def test_steps_of_a_page() -> None:
    page = """
Text.

```python
# my/train.py
print(1)
```

The config
`serving.json`:

```json
{"a": 1}
```

```yaml
shown: only
```

<!-- not run: needs a cluster -->
```console
$ kubectl get pods
```

1. In a list:

   ```console
   $ echo a \\
       b
   a b

   $ true
   ```
"""
    assert steps(page) == [
        File(4, "my/train.py", "# my/train.py\nprint(1)\n"),
        File(12, "serving.json", '{"a": 1}\n'),
        NotRun(21, "needs a cluster"),
        Command(28, "echo a \\\n    b", "a b"),
        Command(32, "true", ""),
    ]


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("<!-- not run: -->\n```console\n$ true\n```", "line 2: the block is not run, without a reason"),
        ("<!-- not run: -->\n\n```python\n# a.py\n```", "line 3: the block is not run, without a reason"),
        ("```python\nprint(1)\n```", "line 1: a block of python is neither a file nor run"),
        ("```bash\ntrue\n```", "Write ```console"),
        ("```console\ntrue\n```", "line 2: a console block begins with a command"),
        ("Do:\n\n    tpuembed demo\n", "line 3: an indented block is never run"),
        ("```text\n# ../a.txt\n```", "outside of the page's folder"),
    ],
)
def test_a_page_that_breaks_the_convention(page: str, says: str) -> None:
    with pytest.raises(PageError) as caught:
        steps(page)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "lines",
    [
        ("$ echo a; echo b >&2", "a", "b"),
        ("$ echo a b c", "a ... c"),
        ("$ echo 0.25 s", "0.... s"),
        ("$ echo a", "...", "a"),
        ("$ seq 9", "1", "...", "8", "9"),
        ("$ seq 9", "..."),
        ("$ seq 9", "1", "..."),
        ("$ seq 9",),
        ("$ printf 'a  \\n\\nb\\n\\n'", "a", "", "b"),
        ("$ echo refused; false", "refused"),
        ("$ cd /; export A=3", "$ echo $PWD $A", "/ 3"),
        ("$ echo '(a+) [b]'", "(a+) [b]"),
        ("$ echo 0.8501", "0.8501"),
        ("$ printf 'I0000 00:00:1795423909.5 2 port.cc:3] x\\na\\n'", "a"),
    ],
)
def test_output_that_the_page_shows(lines: tuple[str, ...], tmp_path: Path) -> None:
    run(console(*lines), tmp_path / "page")


@pytest.mark.parametrize(
    "lines",
    [
        ("$ echo b", "a"),
        ("$ echo a b", "a"),
        ("$ echo a", "a", "b"),
        ("$ seq 9", "1", "...", "8"),
        ("$ true", "a"),
        ("$ false",),
        ("$ false", "..."),
        ("$ exit 0", "$ true"),
        ("$ echo 'a",),
        ("$ sleep 0 &", "ready"),
    ],
)
def test_output_that_the_page_does_not_show(lines: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(PageError, match="line 2: "):
        run(console(*lines), tmp_path / "page")


def test_a_failure_says_the_line_the_command_and_both_outputs(tmp_path: Path) -> None:
    with pytest.raises(PageError) as caught:
        run("# Title\n\n" + console("$ echo a", "a", "$ echo b", "c"), tmp_path / "page")
    assert str(caught.value) == "line 6: echo b\nprinted what the page does not.\nThe page:\nc\nThe run:\nb"


def test_nothing_outside_of_the_machine_is_reached(tmp_path: Path) -> None:
    run(console("$ curl -sS http://example.com", "curl: ... 127.0.0.1 port 9 ..."), tmp_path / "page")


def assert_ends(pid_file: Path) -> None:
    status, deadline = Path(f"/proc/{int(pid_file.read_text())}/status"), time.monotonic() + 10
    with contextlib.suppress(OSError):  # it is gone
        while "State:\tZ" not in status.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_server_in_the_background_ends_with_a_page_that_fails(tmp_path: Path) -> None:
    server = "$ (echo $BASHPID > pid; echo ready; exec sleep 60) &"
    with pytest.raises(PageError, match="line 4: "):
        run(console(server, "ready", "$ false"), tmp_path / "page")
    assert_ends(tmp_path / "page" / "pid")
