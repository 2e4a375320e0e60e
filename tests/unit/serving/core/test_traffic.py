"""The always-on counters, against numpy's own percentiles and plain sums."""

import pickle
from typing import Any

import numpy as np
import pytest

from tpuembed_serving.core import traffic
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.core.traffic import SLOT_SECONDS, Traffic, summarize


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(traffic, "time", clock)
    return clock


def figures(*counted: Traffic, now: float) -> dict[str, Any]:
    """Of snapshots that travel as between processes."""
    return summarize([pickle.loads(pickle.dumps(one.snapshot())) for one in counted], now)


def test_percentiles_of_two_workers_are_within_a_bucket_of_all_their_latencies(clock: Clock) -> None:
    workers = Traffic(), Traffic()
    latencies = np.random.default_rng(0).lognormal(-6, 1.5, (2, 3000))
    for worker, found in zip(workers, latencies, strict=True):
        for seconds in found.tolist():
            worker.count("m", clock.now - seconds, None)
    found = figures(*workers, now=clock.now + SLOT_SECONDS)["m"]
    for name, part in (("p50_ms", 50), ("p99_ms", 99)):
        assert found[name] == pytest.approx(1000 * np.percentile(latencies, part), rel=0.2)
    assert found["answers"] == 6000


def test_failures_have_their_codes_and_no_latency(clock: Clock) -> None:
    counted = Traffic()
    counted.count("m", clock.now - 1, StatusError(Code.NOT_FOUND, "no"))
    counted.count("m", clock.now - 1, ValueError("not ours"))
    found = figures(counted, now=clock.now + SLOT_SECONDS)["m"]
    assert found["failures"] == {"NOT_FOUND": 1, "INTERNAL": 1}
    assert (found["p50_ms"], found["failure_series"][-1]) == (None, 2 / SLOT_SECONDS)


def test_invented_names_take_no_more_memory_than_a_thousand(clock: Clock) -> None:
    counted = Traffic()
    for number in range(1500):
        counted.count(f"m{number}", clock.now, None)
    found = figures(counted, now=clock.now)
    assert len(found) == 1001
    assert found["(others)"]["answers"] == 500
