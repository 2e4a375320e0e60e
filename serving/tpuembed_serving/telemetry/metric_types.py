"""Counters, gauges and histograms, and Prometheus' text format of them.

Observations are added many at once, and each cell has one writer at a time.

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
    """Upper bounds of buckets, without the infinite one (`Buckets::Exponential` of TensorFlow's sampler.cc)."""
    bounds = [scale]
    while len(bounds) < count:
        bounds.append(bounds[-1] * growth)
    return tuple(bounds)


@dataclasses.dataclass(frozen=True)
class Family:
    """All cells of one name.

    Attributes:
        name: as Prometheus has it.
        kind: counter, gauge or histogram.
        labels: their names.
        bounds: of a histogram's buckets, without the infinite one.
    """

    name: str
    kind: str
    labels: Labels
    bounds: tuple[float, ...] = ()


Values = Mapping[Labels, tuple[float, ...]]
"""Values of labels -> one number; of a histogram, its sum and then a count for each bucket."""

Snapshot = Mapping[Family, Values]
"""What processes send each other, and add up."""


class Counter:
    """Whole numbers that only grow, by values of labels."""

    def __init__(self, name: str, *labels: str) -> None:
        self.family = Family(name, "counter", labels)
        self._cells: dict[Labels, int] = {}

    def add(self, labels: Labels, amount: int = 1) -> None:
        """One writer."""
        self._cells[labels] = self._cells.get(labels, 0) + amount

    def values(self) -> Values:
        """A copy."""
        return {labels: (value,) for labels, value in dict(self._cells).items()}


class HistogramCell:
    """How many observations fell into which bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def add(self, values: npt.ArrayLike) -> None:
        """One observation, or several."""
        observed = np.atleast_1d(np.asarray(values, np.float64))
        places = np.searchsorted(self._bounds, observed, side="left")
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(observed.sum())

    def numbers(self) -> tuple[float, ...]:
        """Sum and counts, as `Values` has them."""
        return self._sum, *self._counts.tolist()


class Histogram:
    """Cells by values of labels."""

    def __init__(self, name: str, bounds: tuple[float, ...], *labels: str) -> None:
        self.family = Family(name, "histogram", labels, bounds)
        self._cells: dict[Labels, HistogramCell] = {}

    def cell(self, *labels: str) -> HistogramCell:
        """Of these values; made where there is none."""
        cell = self._cells.get(labels)
        if cell is None:
            cell = self._cells[labels] = HistogramCell(self.family.bounds)
        return cell

    def values(self) -> Values:
        """A copy."""
        return {labels: cell.numbers() for labels, cell in dict(self._cells).items()}


def merge_snapshots(snapshots: Iterable[Snapshot]) -> dict[Family, dict[Labels, tuple[float, ...]]]:
    """The sums of what several processes have."""
    total: dict[Family, dict[Labels, tuple[float, ...]]] = {}
    for snapshot in snapshots:
        for family, values in snapshot.items():
            known = total.setdefault(family, {})
            for labels, numbers in values.items():
                before = known.get(labels)
                known[labels] = tuple(map(sum, zip(before, numbers, strict=True))) if before else numbers
    return total


def to_text(snapshot: Snapshot) -> str:
    """Prometheus' text format; families by name."""
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
    """Theirs leaves line ends as they are, which no reader takes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
