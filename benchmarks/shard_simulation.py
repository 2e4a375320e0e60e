"""A simulation, not a measurement: 100,000 requests a second on 64 shards with 3 replicas each, with and without hedging.

    python -m benchmarks.shard_simulation [--seconds N]

The processor times are those that `benchmarks/shards.py` measured, for as many shards: of the front, and of a shard alone. Each
process of a server is a queue, first come, first served. Requests come at random (Poisson). A call goes to a random process of a
random replica of its shard. Service times are lognormal: the mean is the measured processor time, and the spread is the measured
p99 / p50 of one connection. A request waits for a process of the front first, which spends all of its processor time on it. Then it
waits for the slowest of its calls.

A hedge is a second call, when the first one has had no answer for a given time. The first answer counts, and the other call runs to
its end: a server does not stop a lookup that has begun. The events of a shard are simulated in their order, without approximation.
Not simulated: the network, the sharing of caches and memory by processes of a machine, and the batching of calls.
"""

import argparse
import collections
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

RATE = 100_000.0
REPLICAS = 3
BUSY = 0.6
"""The share of the time that a process works, by which the number of processes is chosen."""
DEADLINE_MS = 1000.0
FRONT_HEDGE = 0.3
"""The front's own hedge: after this share of the request's time."""
CORES = 64
"""Of a machine."""
PAGES = 500_000
"""Random reads a second of an NVMe disk: an assumption."""
LOOKUPS = 64
_MEASURED = Path(__file__).parent / "results" / "shards.json"
_WARM = 0.2
"""Seconds at the start that do not count: the queues are empty then."""
_Z99 = 2.3263478740408408
"""The normal distribution's quantile of 99%."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
    """How long a call takes on a process, in milliseconds: lognormal.

    Attributes:
        mean: of all calls.
        sigma: of the logarithm.
    """

    mean: float
    sigma: float

    @classmethod
    def of(cls, mean: float, p99_over_p50: float) -> "Service":
        """Return the distribution with a mean and a ratio of quantiles."""
        return cls(mean=mean, sigma=math.log(p99_over_p50) / _Z99)

    def draw(self, random: np.random.Generator, count: int) -> Array:
        """Return so many times."""
        return random.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hedge:
    """When a call is made a second time.

    Attributes:
        after_ms: without an answer.
        elsewhere: on one of the other replicas. Otherwise on any, as gRPC's next turn may be that of the first call.
    """

    after_ms: float = math.inf
    elsewhere: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """The servers of one shard.

    Attributes:
        processes: of each replica.
        replicas: of the shard.
        stopped: replicas that answer nothing. They are the first ones.
    """

    processes: int
    replicas: int = 1
    stopped: int = 0


def answer_ms(
    arrivals: Array, shard: Shard, service: Any, random: np.random.Generator, hedge: Hedge | None = None
) -> tuple[Array, int]:
    """Return how long each call takes until its answer, in milliseconds, and how many calls were hedged.

    `arrivals` are times in milliseconds, in order. `service` has a method `draw`. A call without an answer takes infinity.
    """
    hedge, count = hedge or Hedge(), len(arrivals)
    first = random.integers(0, shard.replicas, count)
    if hedge.elsewhere:
        second = (first + random.integers(1, shard.replicas, count)) % shard.replicas
    else:
        second = random.integers(0, shard.replicas, count)
    process, process2 = random.integers(0, shard.processes, (2, count))
    queues = (first * shard.processes + process).tolist()
    queues2 = (second * shard.processes + process2).tolist()
    times, times2 = service.draw(random, count).tolist(), service.draw(random, count).tolist()
    free = [math.inf] * (shard.stopped * shard.processes)
    free += [0.0] * ((shard.replicas - shard.stopped) * shard.processes)
    answered = [0.0] * count
    due: collections.deque[tuple[float, int]] = collections.deque()  # in order, because all wait equally long
    hedged, after = 0, hedge.after_ms
    for number, now in enumerate(arrivals.tolist()):
        while due and due[0][0] <= now:
            at, late = due.popleft()
            queue = queues2[late]
            free[queue] = done = max(at, free[queue]) + times2[late]
            answered[late] = min(answered[late], done)
            hedged += 1
        queue = queues[number]
        free[queue] = done = max(now, free[queue]) + times[number]
        answered[number] = done
        if done > now + after:
            due.append((now + after, number))
    for at, late in due:
        queue = queues2[late]
        free[queue] = done = max(at, free[queue]) + times2[late]
        answered[late] = min(answered[late], done)
        hedged += 1
    return np.asarray(answered) - arrivals, hedged


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """All servers.

    Attributes:
        shards: how many a request calls.
        call, front: processor times of a call, and of a request in the front. No front: one server answers.
        busy: the share of the time that a process works, if nothing is hedged.
    """

    shards: int
    call: Service
    front: Service | None
    busy: float = BUSY

    @property
    def processes(self) -> int:
        """The processes of a replica."""
        return _processes(RATE / REPLICAS, self.call, self.busy)

    @property
    def front_processes(self) -> int:
        """The processes of the front."""
        return 0 if self.front is None else _processes(RATE, self.front, self.busy)

    @property
    def cores(self) -> int:
        """One for each process."""
        return self.shards * REPLICAS * self.processes + self.front_processes


def _processes(rate: float, service: Service, busy: float) -> int:
    return math.ceil(rate * service.mean / 1000 / busy)


@dataclasses.dataclass(frozen=True)
class Times:
    """What a simulation found, in milliseconds. A request's time is until its slowest call is answered.

    Attributes:
        requests: their times, the front included.
        slowest: their times in the shards alone.
        p95_of_calls, p99_of_calls: of the calls of one shard.
        hedged: the share of calls that were made twice.
    """

    requests: Array
    slowest: Array
    p95_of_calls: float
    p99_of_calls: float
    hedged: float

    def summary(self) -> dict[str, Any]:
        """Return the quantiles, and the shares."""
        return {
            **_quantiles(self.requests),
            "in the shards": _quantiles(self.slowest),
            "later than the deadline": round(float(np.mean(self.requests > DEADLINE_MS)), 6),
            "calls made twice": round(self.hedged, 4),
        }


def _quantiles(milliseconds: Array) -> dict[str, float]:
    """Return them, or the deadline, at which the front gives up."""
    found = np.minimum(np.quantile(milliseconds, [0.5, 0.99, 0.999], method="lower"), DEADLINE_MS)
    return {name: float(f"{value:.3g}") for name, value in zip(("p50_ms", "p99_ms", "p99.9_ms"), found, strict=True)}


def simulate(
    fleet: Fleet, seconds: float, *, hedge: Hedge | None = None, stopped: bool = False, seed: int = 0
) -> Times:
    """Return the times of all requests of so many seconds. With `stopped`, one replica of one shard answers nothing."""
    random = np.random.default_rng(seed)
    count = int(RATE * (seconds + _WARM))
    came = np.cumsum(random.exponential(1000 / RATE, count))
    sent = came
    if fleet.front is not None:
        sent = came + answer_ms(came, Shard(processes=fleet.front_processes), fleet.front, random)[0]
    order = np.argsort(sent)
    slowest, hedged, calls = np.zeros(count), 0, np.zeros(0)
    for number in range(fleet.shards):
        shard = Shard(processes=fleet.processes, replicas=REPLICAS, stopped=int(stopped and number == 0))
        calls, again = answer_ms(sent[order], shard, fleet.call, random, hedge)
        slowest[order] = np.maximum(slowest[order], calls)
        hedged += again
    warm = came > 1000 * _WARM
    p95, p99 = np.quantile(calls, [0.95, 0.99])
    return Times((sent - came + slowest)[warm], slowest[warm], float(p95), float(p99), hedged / (count * fleet.shards))


def fleet_of(measured: dict[str, Any], name: str, busy: float = BUSY) -> Fleet:
    """Return the servers whose processor times `benchmarks/shards.py` measured as `name`."""
    one, alone = measured[name], measured[name]["a shard alone"]
    calls, of_front = one["calls of a request"], one["CPU ms of a request"]["front"]

    def service(mean: float, spread: dict[str, Any]) -> Service:
        return Service.of(mean, spread["p99_ms, one connection"] / spread["p50_ms, one connection"])

    front = service(of_front, one) if of_front else None
    return Fleet(shards=calls, call=service(alone["CPU ms of a call"], alone), front=front, busy=busy)


def run(seconds: float = 1.0) -> dict[str, Any]:
    """Simulate by the number of shards, by how busy the processes are, and by the hedge."""
    measured = json.loads(_MEASURED.read_text())
    names = [name for name, one in measured.items() if isinstance(one, dict) and "a shard alone" in one]
    by_shards = {}
    for name in names:
        fleet = fleet_of(measured, name)
        by_shards[name] = {**_size(fleet), **simulate(fleet, seconds).summary()}
    fleet = fleet_of(measured, names[-1])
    plain = simulate(fleet, seconds)
    hedges = {
        "none": Hedge(),
        f"after {FRONT_HEDGE:.0%} of the request's time": Hedge(after_ms=FRONT_HEDGE * DEADLINE_MS),
        f"after {FRONT_HEDGE:.0%}, on another replica": Hedge(after_ms=FRONT_HEDGE * DEADLINE_MS, elsewhere=True),
        "after the p99 of calls": Hedge(after_ms=plain.p99_of_calls),
        "after the p95 of calls": Hedge(after_ms=plain.p95_of_calls),
        "after the p95 of calls, on another replica": Hedge(after_ms=plain.p95_of_calls, elsewhere=True),
    }
    by_busy = {}
    for busy in (0.4, BUSY, 0.75):
        sized = fleet_of(measured, names[-1], busy)
        by_busy[str(busy)] = {**_size(sized), **simulate(sized, seconds).summary()}
    alone = by_shards[names[0]]["cores"]
    machines = max(1, math.ceil(alone / CORES))
    return {
        "simulation": True,
        "requests_per_second": RATE,
        "replicas": REPLICAS,
        "busy": BUSY,
        "deadline_ms": DEADLINE_MS,
        "seconds": seconds,
        "call p99 / p50": round(math.exp(_Z99 * fleet.call.sigma), 2),
        "front p99 / p50": round(math.exp(_Z99 * fleet.front.sigma), 2) if fleet.front else None,
        "call": _rounded(dataclasses.asdict(fleet.call) | {"p95_ms": plain.p95_of_calls, "p99_ms": plain.p99_of_calls}),
        "front": _rounded(dataclasses.asdict(fleet.front)) if fleet.front else None,
        "by number of shards": by_shards,
        f"{names[-1]}, by how busy they are": by_busy,
        f"{names[-1]}, by hedge": {
            state: {
                name: simulate(fleet, seconds, hedge=hedge, stopped=stopped).summary() for name, hedge in hedges.items()
            }
            for state, stopped in (("all servers run", False), ("one replica of 192 is stopped", True))
        },
        "machines with all tables": {
            "cores of a machine": CORES,
            "machines": machines,
            "cores of 64 shards / theirs": round(by_shards[names[-1]]["cores"] / alone, 1),
            "pages a second of a disk, assumed": PAGES,
            "share of lookups that may miss memory": round(min(1.0, machines * PAGES / (RATE * LOOKUPS)), 3),
        },
    }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 3) for key, value in values.items()}


def _size(fleet: Fleet) -> dict[str, Any]:
    return {
        "cores": fleet.cores,
        "cores of the front": fleet.front_processes,
        "processes of a replica": fleet.processes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="that are simulated")
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
