"""describe, verify, diff and head as a user sees them: values, names and paths of any kind, terminals, and large files."""

import contextlib
import json
import os
import pty
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.checkpoint.bundles import write
from tests.support.serving.process import run_command
from tpuembed.formats.tensor_bundle import Entry, index_path, shard_path, write_index

COMMAND = [sys.executable, "-m", "tpuembed_cli.main"]
ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "tfrs" / "keras_adam"


def run(*arguments: Any) -> "subprocess.CompletedProcess[str]":
    return run_command(*arguments)


def ok(*arguments: Any) -> str:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    table = np.array([[1.5, float("nan")], [float("inf"), -float("inf")], [0.1, -0.0]], np.float32)
    write(tmp_path / "ckpt", {"[red]table": table, "wide": np.arange(40, dtype=ml_dtypes.bfloat16).reshape(2, 20)})
    return tmp_path / "ckpt"


def test_head(prefix: Path) -> None:
    assert ok("head", prefix, "[red]table") == "0: 1.5 nan\n1: inf -inf\n2: 0.1 -0.0\n"
    assert ok("head", prefix, "[red]table", "--rows", "1:2") == "1: inf -inf\n"
    assert ok("head", prefix, "[red]table", "--rows", ":1") == "0: 1.5 nan\n"
    assert ok("head", prefix, "[red]table", "--rows", "3:3") == ""
    assert ok("head", prefix, "wide", "--rows", "0:1") == "0: 0 1 2 3 4 5 6 7 ... (20 values)\n"
    assert json.loads(ok("head", prefix, "[red]table", "--json")) == {
        "table": "[red]table",
        "slot": None,
        "start": 0,
        "dtype": "float32",
        "values": [[1.5, "NaN"], ["Infinity", "-Infinity"], [0.1, 0.0]],
    }
    momenta = np.load(GOLDEN / "table2-momenta.npy")
    found = json.loads(ok("head", GOLDEN, "table_2", "--slot", "momenta", "--json", "--rows", "2:4"))
    np.testing.assert_array_equal(np.array(found["values"], np.float32), momenta[2:4])


def test_verify_says_what_it_cannot_check() -> None:
    done = run("verify", Path(__file__).parents[2] / "golden" / "keras_rs" / "weights_h5" / "model.weights.h5")
    assert done.returncode == 0
    assert done.stderr.startswith("Not checked: format keras")


@pytest.mark.parametrize(
    "arguments",
    [
        ["head", "{ckpt}", "t", "--rows", "0:100000"],
        ["head", "{ckpt}", "t", "--rows", "0:100000", "--json"],
        ["describe", "{ckpt}"],
        ["describe", "{ckpt}", "--json"],
        ["verify", "{ckpt}"],
        ["diff", "{ckpt}", "{ckpt}"],
    ],
    ids=" ".join,
)
@pytest.mark.sampled(2)
def test_whoever_reads_the_output_may_stop(tmp_path: Path, arguments: list[str]) -> None:
    """As `head -1` does: nothing is said about it."""
    write(tmp_path / "ckpt", {"t": np.zeros((100_000, 2), np.float32)})
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, *(argument.format(ckpt=tmp_path / "ckpt") for argument in arguments)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


NAMES = ["\x1b[31mred", "two\nlines", "é", "\u202eltr"]
ESCAPED = [r"\x1b[31mred", r"two\nlines", "é", r"\u202eltr"]


@pytest.mark.parametrize("command", ["describe", "diff", "verify", "head"])
def test_names_do_nothing_to_a_terminal(tmp_path: Path, command: str) -> None:
    write(tmp_path / "a", {name: np.zeros((3, 2), np.float32) for name in NAMES})
    write(tmp_path / "b", {"other": np.zeros((3, 2), np.float32)})
    data = shard_path(tmp_path / "a", 0, 1)
    data.write_bytes(b"\xff" * data.stat().st_size)
    more: dict[str, list[Any]] = {"diff": [tmp_path / "b"], "head": ["nonsense"]}
    done = run(command, tmp_path / "a", *more.get(command, ()))
    assert (done.returncode, done.stderr[:5]) in {(0, ""), (1, "Error")}
    assert all(name in done.stdout + done.stderr for name in ESCAPED)
    assert all(char.isprintable() or char == "\n" for char in done.stdout + done.stderr)
    assert len(done.stderr.splitlines()) <= 1


@pytest.mark.nightly
def test_what_stdout_has_no_letters_for(tmp_path: Path) -> None:
    write(tmp_path / "é", {"ü": np.zeros((3, 2), np.float32)})
    for arguments in (
        ["describe", tmp_path / "é"],
        ["verify", tmp_path / "é"],
        ["diff", tmp_path / "é", tmp_path / "é"],
    ):
        command = [*COMMAND, *map(str, arguments)]
        for encoding in ("ascii", "utf-8:strict"):
            environment = {**os.environ, "PYTHONIOENCODING": encoding}
            done = subprocess.run(command, capture_output=True, env=environment, timeout=120)
            assert (done.returncode, done.stderr) == (0, b"")


def test_a_path_that_is_no_utf_8(tmp_path: Path) -> None:
    """Python has such bytes as lone surrogates, which no encoding has."""
    prefix = tmp_path / os.fsdecode(b"\xff")
    write(prefix, {"t": np.zeros((3, 2), np.float32)})
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    for command in ("describe", "verify"):
        done = subprocess.run([*COMMAND, command, str(prefix)], capture_output=True, env=environment, timeout=120)
        assert (done.returncode, done.stderr) == (0, b"")
        assert rb"\udcff: " in done.stdout


@pytest.mark.parametrize("columns", [3, 20, 40, 200])
@pytest.mark.sampled(2)
def test_a_narrow_terminal_loses_nothing(prefix: Path, columns: int) -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    with subprocess.Popen([*COMMAND, "describe", str(prefix)], stdout=follower, env=environment) as process:
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # at the end
            while piece := os.read(leader, 65536):
                shown += piece
    os.close(leader)
    assert process.returncode == 0
    lines = shown.decode().splitlines()
    assert ("│" in shown.decode()) == (columns == 200)
    if columns < 200:
        assert lines[-7:] == [
            "name: wide",
            "rows: 2",
            "dim: 20",
            "dtype: bfloat16",
            "slots: -",
            "layout: -",
            "bytes: 80 B",
        ]


def test_verify_shows_a_bar_on_a_terminal(prefix: Path, tmp_path: Path) -> None:
    """And the result is alone on stdout."""
    size = 300 << 20
    with open(shard_path(tmp_path / "big", 0, 1), "wb") as file:
        file.truncate(size)
    entry = Entry(dtype="float32", shape=(size // 256, 64), size=size, crc32c=0)
    write_index(index_path(tmp_path / "big"), {"t": entry}, 1)
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "verify", str(tmp_path / "big")],
        stdout=subprocess.PIPE,
        stderr=follower,
        env={**os.environ, "TERM": "xterm"},
    ) as process:
        os.close(follower)
        shown = b""
        while True:
            try:
                shown += os.read(leader, 65536)
            except OSError:
                break
            if not shown:
                break
        assert process.stdout is not None
        out = process.stdout.read().decode()
    os.close(leader)
    assert process.returncode == 1
    assert out.startswith(str(shard_path(tmp_path / "big", 0, 1)))
    assert "verify" in shown.decode()


def _children_seconds() -> float:
    """CPU seconds of the processes that have ended: what others do to the machine does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.nightly
def test_a_table_of_two_terabytes(tmp_path: Path) -> None:
    """A sparse file: described, and rows beyond 2^32 shown, for the work that a command takes to start."""
    rows, dim = 1 << 33, 64
    prefix, marker = tmp_path / "huge", np.arange(dim, dtype=np.float32)
    with open(shard_path(prefix, 0, 1), "wb") as file:
        file.truncate(rows * dim * 4)
        file.seek((rows - 2) * dim * 4)
        file.write(marker.tobytes())
    write_index(index_path(prefix), {"t": Entry(dtype="float32", shape=(rows, dim), size=rows * dim * 4)}, 1)
    for arguments in (["describe", prefix, "--json"], ["head", prefix, "t", "--rows", f"{rows - 2}:{rows}", "--json"]):
        seconds = []
        for _ in range(3):
            started = _children_seconds()
            found = json.loads(ok(*arguments))
            seconds.append(_children_seconds() - started)
        assert min(seconds) < 1
    np.testing.assert_array_equal(found["values"], [marker, np.zeros(dim)])
    _check_all_rows_begin_to_come(prefix, rows)


def _check_all_rows_begin_to_come(prefix: Path, rows: int) -> None:
    """In a GB of address space, of which the program itself takes a part."""
    limit = 1 << 30
    for more in ([], ["--json"]):
        with subprocess.Popen(
            [*COMMAND, "head", str(prefix), "t", "--rows", f"0:{rows}", *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert len(process.stdout.read(1 << 20)) == 1 << 20
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 1
