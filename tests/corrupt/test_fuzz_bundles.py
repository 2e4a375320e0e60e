"""Damaged checkpoints in tensor bundles: see bundle_fuzzer.py."""

import json
import subprocess
import sys

import pytest

from tests.support.goldens import BUNDLES


@pytest.mark.parametrize("name", BUNDLES)
@pytest.mark.sampled(3)
def test_damage(name: str) -> None:
    count = 200
    command = [sys.executable, "-m", "tests.support.checkpoint.bundle_fuzzer", BUNDLES[name], "0", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert not found["failures"], "\n".join(found["failures"])
    assert sum(found["outcomes"].values()) == count
    print(name, json.dumps(found))
    refused = sum(times for outcome, times in found["outcomes"].items() if outcome.endswith("Error"))
    assert refused > count // 2
