"""Counters, gauges and histograms, and their text format for Prometheus.

Observations are added in batches, and each cell has one writer at a time.

Source of the format: TensorFlow Serving's util/prometheus_exporter.cc, and
https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["Counter", "Family", "Histogram", "HistogramCell", "Snapshot", "exponential", "merge_snapshots", "to_text"]

Labels = tuple[str, ...]


def exponential(scale: float, growth: float, count: int) -> tuple[float, ...]:
    """Return upper bounds of buckets without the infinite one, as `Buckets::Exponential` of TensorFlow's sampler.cc."""
    bounds = [scale]
    while len(bounds) < count:
        bounds.append(bounds[-1] * growth)
    return tuple(bounds)


@dataclasses.dataclass(frozen=True)
class Family:
    """A metric: its name, kind and labels.

    Attributes:
        name: in Prometheus' form.
        kind: counter, gauge or histogram.
        labels: the names of its labels.
        bounds: the upper bounds of a histogram's buckets, without the infinite one.
    """

    name: str
    kind: str
    labels: Labels
    bounds: tuple[float, ...] = ()


Values = Mapping[Labels, tuple[float, ...]]
"""The number for each combination of label values. For a histogram: the sum, then a count for each bucket."""

Snapshot = Mapping[Family, Values]
"""The values of all metrics of one process."""


class Counter:
    """Integers that only increase, one for each combination of label values."""

    def __init__(self, name: str, *labels: str) -> None:
        self.family = Family(name, "counter", labels)
        self._cells: dict[Labels, int] = {}

    def add(self, labels: Labels, amount: int = 1) -> None:
        """Add `amount`. One thread at a time."""
        self._cells[labels] = self._cells.get(labels, 0) + amount

    def values(self) -> Values:
        """Return a copy of the values."""
        return {labels: (value,) for labels, value in dict(self._cells).items()}


class HistogramCell:
    """The sum of observations, and their number in each bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def add(self, values: npt.ArrayLike) -> None:
        """Add one observation or several."""
        observed = np.atleast_1d(np.asarray(values, np.float64))
        places = np.searchsorted(self._bounds, observed, side="left")
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(observed.sum())

    def numbers(self) -> tuple[float, ...]:
        """Return the sum and the counts, as in `Values`."""
        return self._sum, *self._counts.tolist()


class Histogram:
    """Histogram cells, one for each combination of label values."""

    def __init__(self, name: str, bounds: tuple[float, ...], *labels: str) -> None:
        self.family = Family(name, "histogram", labels, bounds)
        self._cells: dict[Labels, HistogramCell] = {}

    def cell(self, *labels: str) -> HistogramCell:
        """Return the cell of these label values. Creates it if it is missing."""
        cell = self._cells.get(labels)
        if cell is None:
            cell = self._cells[labels] = HistogramCell(self.family.bounds)
        return cell

    def values(self) -> Values:
        """Return a copy of the values."""
        return {labels: cell.numbers() for labels, cell in dict(self._cells).items()}


def merge_snapshots(snapshots: Iterable[Snapshot]) -> dict[Family, dict[Labels, tuple[float, ...]]]:
    """Return the sums of the values of several processes."""
    total: dict[Family, dict[Labels, tuple[float, ...]]] = {}
    for snapshot in snapshots:
        for family, values in snapshot.items():
            known = total.setdefault(family, {})
            for labels, numbers in values.items():
                before = known.get(labels)
                known[labels] = tuple(map(sum, zip(before, numbers, strict=True))) if before else numbers
    return total


def to_text(snapshot: Snapshot) -> str:
    """Return Prometheus' text format, sorted by metric."""
    families = sorted(snapshot, key=lambda family: family.name)
    return "".join(f"{line}\n" for family in families for line in _lines(family, snapshot[family]))


def _lines(family: Family, values: Values) -> Iterator[str]:
    yield f"# TYPE {family.name} {family.kind}"
    for labels, numbers in values.items():
        pairs = [f'{name}="{_escaped(value)}"' for name, value in zip(family.labels, labels, strict=True)]
        if family.kind == "histogram":
            yield from _histogram_lines(family, pairs, numbers)
        else:
            yield f"{family.name}{{{','.join(pairs)}}} {int(numbers[0])}"


def _histogram_lines(family: Family, pairs: list[str], numbers: Sequence[float]) -> Iterator[str]:
    count = 0
    for bound, observed in zip((*(f"{bound:g}" for bound in family.bounds), "+Inf"), numbers[1:], strict=True):
        count += int(observed)
        yield f"{family.name}_bucket{{{','.join([*pairs, _LE % bound])}}} {count}"
    labels = ",".join(pairs)
    yield f"{family.name}_sum{{{labels}}} {numbers[0]:.15g}"
    yield f"{family.name}_count{{{labels}}} {count}"


_LE: Final = 'le="%s"'


def _escaped(value: str) -> str:
    """Escape a label value. TensorFlow Serving does not escape line ends, which no reader accepts."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
