"""Predictions beside open consoles: requests per second with three pages that poll, and with none, in turns.

    python -m benchmarks.console [--rounds N] [--seconds N]

Each page is a client that reads `/console/state` and pauses as `http/static/console.js` does. The client of the predictions is
`wrk`. Rounds alternate which of the two comes first; the ratio is the median of the rounds' own.
"""

import argparse
import json
import os
import re
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.serve import OURS, Bench, Server, figures, wrk

CONNECTIONS, PAGES = 8, 3
_SCRIPT = Path(__file__).parents[1] / "serving" / "tpuembed_serving" / "http" / "static" / "console.js"


def pause_seconds() -> float:
    """How long the page waits between two reads."""
    found = re.search(r"PAUSE_MS = (\d+);", _SCRIPT.read_text(encoding="utf-8"))
    assert found, "console.js has no PAUSE_MS"
    return int(found[1]) / 1000


def _poll(server: Server, pause: float, closed: threading.Event, seconds: list[float]) -> None:
    while not closed.wait(pause):
        started = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/console/state", timeout=10) as reply:
            reply.read()
        seconds.append(time.perf_counter() - started)


def _measure(server: Server, script: Path, seconds: int, pages: int, polls: list[float]) -> dict[str, float]:
    closed, pause = threading.Event(), pause_seconds()
    threads = [threading.Thread(target=_poll, args=(server, pause, closed, polls)) for _ in range(pages)]
    for thread in threads:
        thread.start()
    try:
        return figures(wrk(server, script, CONNECTIONS, seconds))
    finally:
        closed.set()
        for thread in threads:
            thread.join()


def _processor_share(server: Server, seconds: int) -> float:
    """Return the processors that the pages alone take of the server, which answers nothing else."""

    def used() -> float:
        fields = Path(f"/proc/{server.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    closed, started = threading.Event(), used()
    threads = [threading.Thread(target=_poll, args=(server, pause_seconds(), closed, [])) for _ in range(PAGES)]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    closed.set()
    for thread in threads:
        thread.join()
    return (used() - started) / seconds


def run(rounds: int = 40, seconds: int = 3) -> dict[str, Any]:
    """Measure one server with the pages open and closed, `rounds` times each. Then the pages alone.

    Returns:
        "open / closed" is the ratio of requests per second, "open", "closed" their medians with p99, "poll ms" a page's wait,
        "processors, pages alone" what they take of the server where nobody else asks it.
    """
    found: dict[str, list[dict[str, float]]] = {"open": [], "closed": []}
    polls: list[float] = []
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-") as folder:
        bench = Bench(Path(folder), 1, None, (OURS,))
        try:
            script = bench.script("rows", 1)
            with bench.awake(OURS) as server:
                _measure(server, script, 2, PAGES, [])
                for number in range(rounds):
                    for state in ("open", "closed") if number % 2 else ("closed", "open"):
                        found[state].append(_measure(server, script, seconds, PAGES * (state == "open"), polls))
                share = _processor_share(server, 20)
        finally:
            bench.close()
    assert not sum(one["errors"] for each in found.values() for one in each)
    rates = {state: [one["requests_per_second"] for one in each] for state, each in found.items()}
    ratios = [shown / hidden for shown, hidden in zip(rates["open"], rates["closed"], strict=True)]
    return {
        "rounds": rounds,
        "connections": CONNECTIONS,
        "pages": PAGES,
        "open / closed": round(statistics.median(ratios), 3),
        "least and greatest ratio": [round(min(ratios), 3), round(max(ratios), 3)],
        **{
            state: {
                "requests_per_second": round(statistics.median(rates[state])),
                "p99_ms": round(statistics.median(one["p99_ms"] for one in each), 2),
            }
            for state, each in found.items()
        },
        "poll ms": round(statistics.median(polls) * 1000, 1),
        "processors, pages alone": round(share, 4),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=int, default=3)
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))
