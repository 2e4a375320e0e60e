"""benchmarks/shard_simulation.py beside what theory says of queues."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.shard_simulation import Fleet, Hedge, Service, Shard, answer_ms, simulate

Array = np.ndarray[Any, Any]
ROOT = Path(__file__).parents[2]


class Exponential:
    def __init__(self, mean: float) -> None:
        self.mean = mean

    def draw(self, random: np.random.Generator, count: int) -> Array:
        return random.exponential(self.mean, count)


def arrivals(random: np.random.Generator, every_ms: float, count: int) -> Array:
    return np.cumsum(random.exponential(every_ms, count))


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
def test_one_queue_waits_as_long_as_theory_says(busy: float) -> None:
    """M/M/1: the mean time in the system is 1 / (service rate - arrival rate)."""
    random = np.random.default_rng(0)
    found, hedged = answer_ms(arrivals(random, 1 / busy, 400_000), Shard(processes=1), Exponential(1.0), random)
    assert found.mean() == pytest.approx(1 / (1 - busy), rel=0.05)
    assert np.quantile(found, 0.99) == pytest.approx(math.log(100) / (1 - busy), rel=0.1)
    assert hedged == 0


def test_a_spread_of_service_times_waits_as_long_as_theory_says() -> None:
    """M/G/1, by Pollaczek and Khinchine: the mean wait is arrival rate x mean of squares / (2 (1 - busy))."""
    random, service, busy = np.random.default_rng(1), Service(mean=2.0, sigma=0.8), 0.5
    found, _ = answer_ms(arrivals(random, 2.0 / busy, 400_000), Shard(processes=1), service, random)
    squares = service.mean**2 * math.exp(service.sigma**2)
    assert found.mean() == pytest.approx(2.0 + busy / 2.0 * squares / (2 * (1 - busy)), rel=0.05)


def test_processes_share_the_calls() -> None:
    """Poisson arrivals that are divided at random are Poisson: six queues, each as busy as one with a sixth."""
    random = np.random.default_rng(2)
    shard = Shard(processes=2, replicas=3)
    found, _ = answer_ms(arrivals(random, 1 / (6 * 0.5), 400_000), shard, Exponential(1.0), random)
    assert found.mean() == pytest.approx(2.0, rel=0.05)


def test_a_hedge_at_once_takes_the_faster_of_two() -> None:
    """Without a queue, the least of two exponential times has half of their mean."""
    random = np.random.default_rng(3)
    hedge = Hedge(after_ms=0.0, elsewhere=True)
    shard = Shard(processes=1, replicas=2)
    found, hedged = answer_ms(arrivals(random, 1000.0, 100_000), shard, Exponential(1.0), random, hedge)
    assert found.mean() == pytest.approx(0.5, rel=0.02)
    assert hedged == 100_000


def test_a_hedge_starts_when_it_is_due() -> None:
    random = np.random.default_rng(4)
    hedge, shard = Hedge(after_ms=1.0, elsewhere=True), Shard(processes=1, replicas=2, stopped=1)
    found, hedged = answer_ms(arrivals(random, 1000.0, 50_000), shard, Exponential(0.5), random, hedge)
    late = 0.5 + 0.5 * math.exp(
        -2
    )  # half of the calls go to the stopped one; of the others, some take longer than 1 ms
    assert hedged / 50_000 == pytest.approx(late, rel=0.03)
    assert found.mean() == pytest.approx((0.5 + 1.0 + 0.5) / 2, rel=0.03)


def test_a_stopped_replica_answers_nothing() -> None:
    random, shard = np.random.default_rng(5), Shard(processes=1, replicas=3, stopped=1)
    times = arrivals(random, 1000.0, 90_000)
    assert np.isinf(answer_ms(times, shard, Exponential(1.0), random)[0]).mean() == pytest.approx(1 / 3, rel=0.03)
    found, _ = answer_ms(times, shard, Exponential(1.0), random, Hedge(after_ms=30.0))
    assert np.isinf(found).mean() == pytest.approx(1 / 9, rel=0.05), "a third of the hedges go there again"
    found, _ = answer_ms(times, shard, Exponential(1.0), random, Hedge(after_ms=30.0, elsewhere=True))
    assert np.isfinite(found).all()


def test_a_request_waits_for_the_slowest_of_its_calls() -> None:
    """Almost without queues: the greatest of n independent times."""
    call = Service(mean=1.0, sigma=0.5)
    found = simulate(Fleet(shards=8, call=call, front=None, busy=0.01), 0.2).requests
    drawn = call.draw(np.random.default_rng(6), 8 * 200_000).reshape(-1, 8).max(-1)
    assert found.mean() == pytest.approx(drawn.mean(), rel=0.03)
    assert np.quantile(found, 0.99) == pytest.approx(np.quantile(drawn, 0.99), rel=0.05)


def test_the_spread_is_the_measured_one() -> None:
    service = Service.of(3.0, 4.0)
    drawn = service.draw(np.random.default_rng(7), 400_000)
    assert drawn.mean() == pytest.approx(3.0, rel=0.01)
    assert np.quantile(drawn, 0.99) / np.quantile(drawn, 0.5) == pytest.approx(4.0, rel=0.03)


def test_the_page_has_the_numbers_of_the_result() -> None:
    """The tables of docs/scaling.md are those of docs/performance.md, which is made of the result."""
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    performance = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").splitlines()
    (section,) = (part for part in page.split("\n## ") if part.startswith("Simulated"))
    result = json.loads((ROOT / "benchmarks" / "results" / "shard_simulation.json").read_text(encoding="utf-8"))
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert [row for row in rows if row not in performance] == []
    hedges = result["64 shards, by hedge"]["one replica of 192 is stopped"]
    assert len(rows) == 4 + len(result["by number of shards"]) + 2 * len(hedges)
    whole = result["machines with all tables"]
    text = " ".join(section.split())
    assert f"{whole['machines']} machines of {whole['cores of a machine']} cores" in text
    assert f"take {whole['cores of 64 shards / theirs']:.0f} times their cores" in text
    assert f"{whole['share of lookups that may miss memory']:.0%} of the lookups" in text
    late = hedges["after 30% of the request's time"]["later than the deadline"]
    assert f"{late:.0%} of the requests fail" in text
