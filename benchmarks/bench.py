"""`tpuembed bench` beside `wrk` itself on servers of one setting, in turns; and whether it finds the same best setting twice.

    python -m benchmarks.bench [--rounds N] [--seconds N]

Ratios are medians of the rounds' own: requests per second of the command's own client, to those of wrk with the same bodies.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.serve import OURS, Bench, bodies, figures, wrk, wrk_script

CONNECTIONS = (1, 8, 64)
_COMMAND = (sys.executable, "-c", "from tpuembed_cli.main import main; main()", "bench")


def run(rounds: int = 5, seconds: int = 2) -> dict[str, Any]:
    """Measure every number of connections `rounds` times with both clients, and the settings of the folder twice."""
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-") as made:
        folder = Path(made)
        (body,) = bodies(1, "rows")[:1]
        (folder / "request.json").write_text(body)
        script = wrk_script(folder / "one.lua", [body])
        bench = Bench(folder, 1, None, (OURS,))
        try:
            with bench.awake(OURS) as server:
                found: dict[int, list[tuple[dict[str, Any], dict[str, float]]]] = {count: [] for count in CONNECTIONS}
                for _ in range(rounds):
                    own = _own(bench.model_dir, folder / "request.json", seconds)
                    for count, measured in zip(CONNECTIONS, own, strict=True):
                        found[count].append((measured, figures(wrk(server, script, count, seconds))))
        finally:
            bench.close()
        settings = [_best(bench.model_dir) for _ in range(2)]
    return {
        "rounds": rounds,
        **{f"{count} connections": _summary(pairs) for count, pairs in found.items()},
        "best settings of two runs": settings,
    }


def _own(model_dir: Path, request: Path, seconds: int) -> list[dict[str, Any]]:
    options = ["--requests", str(request), "--client", "own", "--rounds", "1", "--duration", str(seconds)]
    options += ["--workers", "1", "--max-batch-rows", "512", "--concurrency", ",".join(map(str, CONNECTIONS))]
    done = subprocess.run(
        [*_COMMAND, str(model_dir), *options, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)["measurements"]
    return found


def _best(model_dir: Path) -> Any:
    done = subprocess.run(
        [*_COMMAND, str(model_dir), "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    return json.loads(done.stdout)["best"]


def _summary(pairs: list[tuple[dict[str, Any], dict[str, float]]]) -> dict[str, Any]:
    key = "requests_per_second"
    return {
        "bench, own client": round(statistics.median(own[key] for own, _ in pairs)),
        "wrk": round(statistics.median(other[key] for _, other in pairs)),
        "own client / wrk": round(statistics.median(own[key] / other[key] for own, other in pairs), 3),
        "limit": statistics.mode(own["limit"] for own, _ in pairs),
        "client processors": round(statistics.median(own["client_processors"] for own, _ in pairs), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2, help="of each measurement")
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
