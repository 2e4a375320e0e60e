"""Counts predictions by model in slots of time, always: the figures of the console, without `--metrics`.

A count takes a clock, a search in fixed bounds and two additions. All processes of a machine share the clock of the slots, so
that their slots can be added up.
"""

import bisect
import collections
import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tpuembed_serving.core.status import Code, StatusError

__all__ = ["SLOTS", "SLOT_SECONDS", "ModelTraffic", "Traffic", "summarize"]

SLOT_SECONDS: Final = 2
SLOTS: Final = 150
"""Five minutes."""
_RATE_SLOTS: Final = 5
"""The rate is that of the last ten seconds."""
_LATENCY_SLOTS: Final = 30
"""Percentiles are those of the last minute."""
_BOUNDS: Final = tuple(1e-5 * 1.2**power for power in range(88))
"""Upper bounds of the buckets of latencies, in seconds: from 10 microseconds to 77 seconds, each 20% above the one before."""
_MOST_NAMES: Final = 1000
_OTHERS: Final = "(others)"
"""Clients may invent model names. Names after the first `_MOST_NAMES` are counted under this one."""


@dataclasses.dataclass(slots=True)
class ModelTraffic:
    """The predictions of one model in one process.

    Attributes:
        failures: since the start, by status code.
        slots: slot -> the `counts` of the last `SLOTS`.
        latencies: slot -> bucket -> answers that succeeded, of the last `_LATENCY_SLOTS`.
        ends: when the newest slot ends, by `time.monotonic`.
        counts: of the newest slot: answers, failures, and the answers of all slots before.
        buckets: latencies of the newest slot.
    """

    failures: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    slots: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    latencies: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    ends: float = 0.0
    counts: list[int] = dataclasses.field(default_factory=lambda: [0, 0, 0])
    buckets: list[int] = dataclasses.field(default_factory=list)

    def open_slot(self, now: float) -> None:
        """Begin the slot of `now`, and forget the oldest ones."""
        slot = int(now) // SLOT_SECONDS
        self.ends = (slot + 1) * SLOT_SECONDS
        self.counts, self.buckets = [0, 0, self.counts[2] + self.counts[0]], [0] * (len(_BOUNDS) + 1)
        self.slots = {old: counts for old, counts in self.slots.items() if old > slot - SLOTS - 2}
        self.latencies = {old: found for old, found in self.latencies.items() if old > slot - _LATENCY_SLOTS - 2}
        self.slots[slot], self.latencies[slot] = self.counts, self.buckets


class Traffic:
    """The predictions of one process. The event loop's thread counts; any thread may call `snapshot`."""

    def __init__(self) -> None:
        self._models: dict[str, ModelTraffic] = {}

    def count(self, model: str, started: float, error: Exception | None) -> None:
        """Count an answer that began at `started`, by `time.monotonic`."""
        ended = time.monotonic()
        traffic = self._models.get(model)
        if traffic is None:
            traffic = self._models.setdefault(model if len(self._models) < _MOST_NAMES else _OTHERS, ModelTraffic())
        if ended >= traffic.ends:
            traffic.open_slot(ended)
        traffic.counts[0] += 1
        if error is None:
            traffic.buckets[bisect.bisect_left(_BOUNDS, ended - started)] += 1
        else:
            traffic.counts[1] += 1
            code = error.code if isinstance(error, StatusError) else Code.INTERNAL
            traffic.failures[code.name] += 1

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Return the counts by model, as `summarize` takes them: a copy that may travel to another process."""
        return {
            name: {
                "answers": _total(one.counts),
                "failures": dict(one.failures),
                "slots": {slot: tuple(counts[:2]) for slot, counts in one.slots.copy().items()},
                "latencies": {slot: _present(found) for slot, found in one.latencies.copy().items()},
            }
            for name, one in self._models.copy().items()
        }


def _total(counts: list[int]) -> int:
    return counts[2] + counts[0]


def _present(buckets: list[int]) -> dict[int, int]:
    return {bucket: count for bucket, count in enumerate(buckets) if count}


def summarize(
    snapshots: Iterable[Mapping[str, Mapping[str, Any]]], now: float | None = None
) -> dict[str, dict[str, Any]]:
    """Return the figures of each model from the snapshots of all processes. `now` is by `time.monotonic`.

    The slot that is not over yet is left out, so that a rate does not fall at its start. A latency is interpolated within its
    bucket, so it is at most 20% off.
    """
    slot = int(time.monotonic() if now is None else now) // SLOT_SECONDS
    by_model: dict[str, list[Mapping[str, Any]]] = {}
    for snapshot in snapshots:
        for name, counts in snapshot.items():
            by_model.setdefault(name, []).append(counts)
    return {name: _figures(parts, slot) for name, parts in by_model.items()}


def _figures(parts: list[Mapping[str, Any]], now: int) -> dict[str, Any]:
    failures, buckets = collections.Counter[str](), collections.Counter[int]()
    series = [[0, 0] for _ in range(SLOTS)]
    for part in parts:
        failures.update(part["failures"])
        for slot, (answers, failed) in part["slots"].items():
            place = slot - (now - SLOTS)
            if 0 <= place < SLOTS:
                series[place][0] += answers
                series[place][1] += failed
        for slot, found in part["latencies"].items():
            if now - _LATENCY_SLOTS <= slot < now:
                buckets.update(found)
    recent = series[-_RATE_SLOTS:]
    seconds = SLOT_SECONDS * _RATE_SLOTS
    return {
        "answers": sum(part["answers"] for part in parts),
        "failures": dict(failures),
        "per_second": sum(answers for answers, _ in recent) / seconds,
        "failures_per_second": sum(failed for _, failed in recent) / seconds,
        "p50_ms": _percentile(buckets, 0.5),
        "p99_ms": _percentile(buckets, 0.99),
        "series": [answers / SLOT_SECONDS for answers, _ in series],
        "failure_series": [failed / SLOT_SECONDS for _, failed in series],
    }


def _percentile(buckets: Mapping[int, int], part: float) -> float | None:
    """Return a percentile in milliseconds. None without answers."""
    left = part * sum(buckets.values())
    for bucket in sorted(buckets):
        count = buckets[bucket]
        if left <= count:
            low = _BOUNDS[bucket - 1] if bucket else 0.0
            high = _BOUNDS[min(bucket, len(_BOUNDS) - 1)]
            return 1000 * (low + (high - low) * left / count)
        left -= count
    return None
