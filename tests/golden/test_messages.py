"""tests/golden/messages.txt: what changes it, and what fails because of it, in a small suite of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.messages import GOLDEN, normalised

pytestmark = pytest.mark.nightly

REPOSITORY = Path(__file__).parents[2]

SUITE = """
import pytest
from tests.support.messages import refused

@pytest.mark.parametrize("rows", [3, 4])
def test_rows(rows):
    with refused(ValueError, match=str(rows)) as caught:
        raise ValueError(f"table has {rows} rows")
    assert caught.type is ValueError

def test_two(tmp_path):
    for name in ("a", "b"):
        with refused((KeyError, OSError)):
            raise OSError(f"{tmp_path}/{name}: cannot be read\\nSecond line: port 34567")
"""

WRITTEN = {
    "ValueError: table has 3 rows",
    "ValueError: table has 4 rows",
    r"OSError: TMP/a: cannot be read\nSecond line: port PORT",
    r"OSError: TMP/b: cannot be read\nSecond line: port PORT",
}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """The root of a suite with the hooks of this one, and no golden."""
    (tmp_path / "suite").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider --import-mode=importlib\n")
    shutil.copy(REPOSITORY / "tests" / "conftest.py", tmp_path / "suite" / "conftest.py")
    (tmp_path / "suite" / "test_a.py").write_text(SUITE)
    return tmp_path


def run(suite: Path, *arguments: str) -> tuple[int, str]:
    """Return pytest's exit status and output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", *(arguments or ("suite",))]
    done = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def golden(suite: Path) -> set[str]:
    return {line for line in (suite / GOLDEN).read_text(encoding="utf-8").splitlines() if line[0] != "#"}


def test_a_message_that_is_missing_or_another_one_fails_and_names_the_command(suite: Path) -> None:
    status, output = run(suite)
    assert (status, output.count("4 failed"), output.count("3 failed")) == (1, 0, 1)  # test_two ends at the first
    assert f"{GOLDEN} does not have this message\n+ ValueError: table has 3 rows" in output
    assert "--update-messages" in output
    assert run(suite, "suite", "--update-messages")[0] == 0
    assert golden(suite) == WRITTEN
    assert run(suite)[0] == 0
    (suite / "suite" / "test_a.py").write_text(SUITE.replace("{rows} rows", "no {rows}"))
    status, output = run(suite)
    assert (status, "2 failed, 1 passed" in output) == (1, True), output
    assert "- ValueError: table has " in output
    assert "+ ValueError: table has no 3" in output
    assert "--update-messages" in output
    (suite / "suite" / "test_a.py").write_text(SUITE.replace("raise ValueError", "raise UnicodeError"))
    assert "2 failed, 1 passed" in run(suite)[1]  # the class is part of the message


def test_the_last_error_that_a_command_writes(suite: Path) -> None:
    test = "from tests.support.messages import said\n\ndef test_x(tmp_path):\n    said(f{!r})\n"
    whole = "Usage: x\n\nError: {tmp_path}/a: port 34567.\n"
    (suite / "suite" / "test_a.py").write_text(test.format(whole))
    assert run(suite, "suite", "--update-messages")[0] == 0
    assert golden(suite) == {"Error: TMP/a: port PORT."}
    assert run(suite)[0] == 0
    for output in (whole.replace("/a", "/b"), "the Error: {tmp_path}/a: port 34567.", f"Traceback: {whole}"):
        (suite / "suite" / "test_a.py").write_text(test.format(output))
        assert run(suite)[0] == 1, output


def test_an_update_by_two_processes_adds_and_one_of_all_tests_drops(suite: Path) -> None:
    workers = ("-p", "xdist", "-n", "2", "--update-messages")
    assert run(suite, *workers, "suite")[0] == 0
    (suite / "suite" / "test_a.py").write_text(SUITE.replace("[3, 4]", "[3, 5]"))
    assert run(suite, *workers, "suite")[0] == 0
    assert golden(suite) == WRITTEN | {"ValueError: table has 5 rows"}
    with (suite / "pytest.ini").open("a") as file:
        file.write("testpaths = suite\n")
    assert run(suite, *workers, "-k", "two")[0] == 0
    assert golden(suite) == WRITTEN | {"ValueError: table has 5 rows"}
    assert run(suite, *workers)[0] == 0
    assert golden(suite) == WRITTEN - {"ValueError: table has 4 rows"} | {"ValueError: table has 5 rows"}


def test_what_varies_between_runs_is_taken_out_and_nothing_else() -> None:
    root, base = Path("/home/me/repository"), Path("/var/tmp/pytest-of-me/pytest-7")
    for message, expected in {
        f"checkpoint {base}/test_x0/ckpt: has 3 rows": "checkpoint TMP/ckpt: has 3 rows",
        f"{base}/popen-gw1/test_x0. Free space": "TMP/test_x0. Free space",
        f"file {root}/tests/golden/x": "file ROOT/tests/golden/x",
        "http://127.0.0.1:34567/v1, port 34567": "http://127.0.0.1:PORT/v1, port PORT",
        "process 4321 died": "process PID died",
        "a function at 0x7f0b67b41e80": "a function at ADDRESS",
        "layer 'string_lookup_148' of 'adam/embedding_16_embeddings'": "layer 'string_lookup' of 'adam/embedding_embeddings'",
        "s3://bucket-0210b915a969/m/.staging-1-4b24bd68": "s3://BUCKET/m/.staging-1-ID",
        "table_1 and ckpt-12 have rows [0, 8)": "table_1 and ckpt-12 have rows [0, 8)",
        "CRC32C 0x7f0b67b4, 30000 rows, after 5.0 s": "CRC32C 0x7f0b67b4, 30000 rows, after 5.0 s",
    }.items():
        assert normalised(message, root, base) == expected
    called = (
        "Exception encountered when calling L.call().\n\n\x1b[1mfeature 'x': no ids.\x1b[0m\n\nArguments received:\n  x"
    )
    traced = (
        'in user code:\n\n    File "a.py", line 3, in step  *\n        layer(x)\n\n    tpuembed.errors.ConfigError: '
    )
    for message in (called, traced + "feature 'x': no ids.\n", traced + called.replace("\n", "\n    ")):
        assert normalised(message, root, base) == "feature 'x': no ids."
    assert normalised(f"{base}/popen-gw1/test_x0/m: is", root, base / "popen-gw1") == "TMP/m: is"


def test_other_versions_need_no_golden(suite: Path) -> None:
    assert run(suite)[0] == 1
    assert run(suite, "suite", "--no-messages")[0] == 0
