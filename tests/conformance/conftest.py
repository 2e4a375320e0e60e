"""A process that reads checkpoints without TensorFlow: one for all tests, as starting it takes longer than they do."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.support.checkpoint.conformance import ReadSums

_SCRIPT = """
import json, os, sys
from tpuembed.checkpoint import open_checkpoint
from tpuembed.files import remote
for line in sys.stdin:
    path, options, environment = json.loads(line)
    os.environ.update(environment)
    remote._store.cache_clear()
    with open_checkpoint(path, **options) as checkpoint:
        sums = {}
        for name, info in checkpoint.tables().items():
            rows = (checkpoint.read(name, row, row + 1) for row in range(info.rows))
            sums[name] = sum(float(row.astype("float64").sum()) for row in rows)
    assert "tensorflow" not in sys.modules and "keras" not in sys.modules, path
    print(json.dumps(sums), flush=True)
"""


@pytest.fixture(scope="session")
def _reader() -> Iterator[Callable[[], "subprocess.Popen[str]"]]:
    """Gives the process, and a new one where the last has ended."""
    started: list[subprocess.Popen[str]] = []

    def alive() -> "subprocess.Popen[str]":
        if not started or started[-1].poll() is not None:
            pipe = subprocess.PIPE
            command = [sys.executable, "-c", _SCRIPT]
            started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield alive
    for process in started:
        process.communicate()


@pytest.fixture
def read_sums(_reader: Callable[[], "subprocess.Popen[str]"]) -> ReadSums:
    """The sum of every table of a checkpoint, read row by row in that process."""

    def ask(path: str, options: Mapping[str, Any]) -> dict[str, float]:
        process = _reader()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([path, dict(options), dict(os.environ)]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        sums: dict[str, float] = json.loads(line)
        return sums

    return ask
