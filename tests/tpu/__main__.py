"""`make tpu-proof`: python -m tests.tpu [--all] [--tests] [--processes N]. Writes docs/tpu-proof.md; exits 1 if the proof fails."""

import argparse
import json
import os
import subprocess
import sys
import time

from tests.tpu.cells import COVERING, everything
from tests.tpu.environments import ENVIRONMENTS, REPOSITORY, ROOT, EnvironmentUnavailableError, ensure
from tests.tpu.numbers.running import REQUIRED
from tests.tpu.proof import Proof, problems
from tests.tpu.report import rendered

__all__ = ["main"]

_PAGE = REPOSITORY / "docs" / "tpu-proof.md"


def main() -> int:
    """The exit code."""
    options = _options()
    began = time.perf_counter()
    try:
        for environment in ENVIRONMENTS:
            print(f"{environment.name}: {'made' if ensure(environment) else 'was there'}", flush=True)
    except EnvironmentUnavailableError as error:
        return _skipped(str(error))
    cells = tuple(everything()) if options.all else COVERING
    results = Proof(ROOT / "results", cells, processes=options.processes).results()
    results["seconds"] = round(time.perf_counter() - began)
    (ROOT / "proof.json").write_text(json.dumps(results, default=vars, indent=1))
    _PAGE.write_text(rendered(results))
    found = problems(results)
    print("\n".join([*found, f"{len(cells)} cells, {len(found)} problems, {results['seconds']} s: {_PAGE}"]))
    return 1 if found or (options.tests and not _tests_pass()) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--all", action="store_true", help="the whole product of options, thousands of cells")
    parser.add_argument("--tests", action="store_true", help="the tests of numbers and of V1 too")
    parser.add_argument("--processes", type=int, default=2, help="of a stage at a time")
    return parser.parse_args()


def _tests_pass() -> bool:
    """Whether the tests beside this package's sample pass, none of which may be skipped for want of an environment."""
    command = [sys.executable, "-m", "pytest", "tests/tpu", "--deselect", "tests/tpu/test_sample.py"]
    return subprocess.run(command, cwd=REPOSITORY, env={**os.environ, REQUIRED: "1"}, check=False).returncode == 0


def _skipped(why: str) -> int:
    """Without its wheels the proof is skipped, by name; a build machine must not pass without it."""
    print(f"SKIPPED: make tpu-proof: {why}")
    return 1 if os.environ.get("CI") else 0


if __name__ == "__main__":
    sys.exit(main())
