"""The always-on counters, against numpy's own percentiles and plain sums."""

import pickle
from typing import Any

import numpy as np
import pytest

from tpuembed_serving.core import traffic
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.core.traffic import SLOT_SECONDS, SLOTS, Traffic, summarize


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


def test_the_slot_that_is_not_over_does_not_count_yet(clock: Clock) -> None:
    counted = Traffic()
    for _ in range(20):
        counted.count("m", clock.now, None)
    assert figures(counted, now=clock.now)["m"]["per_second"] == 0
    after = figures(counted, now=clock.now + SLOT_SECONDS)["m"]
    assert after["per_second"] == 2.0
    assert after["series"] == [0.0] * (SLOTS - 1) + [20 / SLOT_SECONDS]


def test_failures_have_their_codes_and_no_latency(clock: Clock) -> None:
    counted = Traffic()
    counted.count("m", clock.now - 1, StatusError(Code.NOT_FOUND, "no"))
    counted.count("m", clock.now - 1, ValueError("not ours"))
    found = figures(counted, now=clock.now + SLOT_SECONDS)["m"]
    assert found["failures"] == {"NOT_FOUND": 1, "INTERNAL": 1}
    assert (found["p50_ms"], found["failure_series"][-1]) == (None, 2 / SLOT_SECONDS)


def test_old_slots_are_forgotten_and_totals_are_not(clock: Clock) -> None:
    counted = Traffic()
    for _ in range(3 * SLOTS):
        counted.count("m", clock.now - 0.001, None)
        clock.now += SLOT_SECONDS
    (snapshot,) = counted.snapshot().values()
    assert len(snapshot["slots"]) <= SLOTS + 2
    assert len(snapshot["latencies"]) < 40
    found = figures(counted, now=clock.now)["m"]
    assert found["answers"] == 3 * SLOTS
    assert found["series"] == [1 / SLOT_SECONDS] * SLOTS
    assert figures(counted, now=clock.now + 1000)["m"]["p50_ms"] is None


def test_invented_names_take_no_more_memory_than_a_thousand(clock: Clock) -> None:
    counted = Traffic()
    for number in range(1500):
        counted.count(f"m{number}", clock.now, None)
    found = figures(counted, now=clock.now)
    assert len(found) == 1001
    assert found["(others)"]["answers"] == 500
