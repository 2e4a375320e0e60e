"""How native/src/lookup.c is compiled: with any compiler or none, and under sanitizers."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
BUILD: dict[str, Any] = runpy.run_path(str(ROOT / "tpuembed/native/src/build.py"))


def test_a_missing_or_failing_compiler_is_a_reason_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "library.so"
    compile_library = BUILD["compile_library"]
    monkeypatch.setenv("CC", "no-such-compiler --flag")
    assert compile_library(target).startswith("no-such-compiler --flag could not run: ")
    monkeypatch.setenv("CC", "false")
    assert compile_library(target) == "false failed: exit status 1"
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compile_library(target) == "no C compiler was found: install gcc or clang, or set CC"
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_random_calls_are_clean_under_sanitizers(tmp_path: Path, seed: int) -> None:
    """Random structs and any ids, on rows that end where their memory ends."""
    target = tmp_path / "library.so"
    fault = BUILD["compile_library"](target, ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"])
    if fault:
        pytest.skip(f"no compiler with sanitizers: {fault}")
    compiler = os.environ.get("CC", "cc")
    names = ["libasan.so", "libubsan.so"]
    found = [subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip() for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.native.fuzz", str(target), str(seed), "20"],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 100
