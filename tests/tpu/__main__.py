"""`make tpu-proof`: trace, lower and compile the TPU path, and write build/tpu-proof.md; exits with 1 where the proof fails."""

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.tpu.cells import COVERING
from tests.tpu.environments import (
    ENVIRONMENTS,
    REPOSITORY,
    ROOT,
    DamagedEnvironmentError,
    EnvironmentUnavailableError,
    ensure,
)
from tests.tpu.numbers.running import REQUIRED
from tests.tpu.proof import Proof, problems
from tests.tpu.report import rendered

__all__ = ["main"]

_PAGE = REPOSITORY / "build" / "tpu-proof.md"


def main() -> int:
    """The exit code."""
    options = _options()
    with _alone() as alone:
        if not alone:
            print(f"another proof runs in {ROOT}: wait for its end")
            return 1
        try:
            with ThreadPoolExecutor(len(ENVIRONMENTS)) as pool:  # pip unpacks and hashes with one core
                for environment, made in zip(ENVIRONMENTS, pool.map(ensure, ENVIRONMENTS), strict=True):
                    print(f"{environment.name}: {'made' if made else 'was there'}", flush=True)
        except EnvironmentUnavailableError as error:
            return _skipped(str(error))
        except DamagedEnvironmentError as error:
            print(error)
            return 1
        return _prove(options)


def _prove(options: argparse.Namespace) -> int:
    began = time.perf_counter()
    results = Proof(ROOT / "results", COVERING, processes=options.processes).results()
    results["seconds"] = round(time.perf_counter() - began)
    (ROOT / "proof.json").write_text(json.dumps(results, default=vars, indent=1))
    _PAGE.parent.mkdir(parents=True, exist_ok=True)
    _PAGE.write_text(rendered(results))
    found = problems(results)
    print(
        "\n".join([*found, f"{len(COVERING)} cells, {len(found)} problems, {results['seconds']} s: {_PAGE}"]),
        flush=True,
    )
    passed = not options.tests or _tests_pass()
    return 0 if passed and not found else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.tpu", description=__doc__)
    parser.add_argument("--tests", action="store_true", help="the tests of numbers and of V1 too")
    parser.add_argument("--processes", type=int, default=2, help="of a stage at a time")
    return parser.parse_args()


@contextlib.contextmanager
def _alone() -> Iterator[bool]:
    """Whether no other proof uses the environments and results. Ctrl-C ends this one at once, and its processes with it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ROOT.mkdir(exist_ok=True)
    with (ROOT / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _tests_pass() -> bool:
    """Whether the tests beside this package's sample pass, none of which may be skipped for want of an environment."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "tests/tpu", "--deselect", "tests/tpu/test_sample.py"]
    return subprocess.run(command, cwd=REPOSITORY, env={**os.environ, REQUIRED: "1"}, check=False).returncode == 0


def _skipped(why: str) -> int:
    """Without its wheels the proof is skipped, by name; a build machine must not pass without it."""
    print(f"SKIPPED: make tpu-proof: {why}")
    return 1 if os.environ.get("CI") else 0


if __name__ == "__main__":
    sys.exit(main())
