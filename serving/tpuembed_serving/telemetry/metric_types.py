"""Adds up the metrics of several processes, and writes them in Prometheus' text format.

The need: clients see the metrics of all workers as one, under TensorFlow Serving's names. prometheus_client merges processes
over files, in a folder that an environment variable names before its import, and ends the names of counters in _total.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client import Metric, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

__all__ = ["Family", "Snapshot", "Values", "merge_snapshots", "read_values", "to_text"]


class Family(NamedTuple):
    """A metric: its name in Prometheus' form, its kind, and its description.

    Its values are added over processes, or with `least` the least one is taken.
    """

    name: str
    kind: str
    description: str
    least: bool = False


Values = Mapping[tuple[str, tuple[tuple[str, str], ...]], tuple[float]]
"""The number of each sample, by the sample's name and labels."""

Snapshot = Mapping[Family, Values]
"""The values of all metrics of one process."""


def read_values(family: Family, metric: MetricWrapperBase) -> Values:
    """Return the values of a metric, with names and bounds of buckets as TensorFlow Serving writes them."""
    values = {}
    for collected in metric.collect():
        for sample in collected.samples:
            suffix = sample.name.removeprefix(collected.name)
            if suffix != "_created":
                name = family.name if family.kind == "counter" else family.name + suffix
                labels = tuple((key, _bound(text) if key == "le" else text) for key, text in sample.labels.items())
                values[name, labels] = (sample.value,)
    return values


def _bound(text: str) -> str:
    return text if text == "+Inf" else f"{float(text):g}"


def merge_snapshots(snapshots: Iterable[Snapshot]) -> dict[Family, Values]:
    """Return the values of several processes as one: their sums, or for a family with `least` the least."""
    total: dict[Family, dict[tuple[str, tuple[tuple[str, str], ...]], tuple[float]]] = {}
    for snapshot in snapshots:
        for family, values in snapshot.items():
            known = total.setdefault(family, {})
            for key, (number,) in values.items():
                if key not in known:
                    known[key] = (number,)
                else:
                    known[key] = (min(known[key][0], number) if family.least else known[key][0] + number,)
    return dict(total)


def to_text(snapshot: Snapshot) -> str:
    """Return Prometheus' text format, sorted by metric."""
    text = generate_latest(_Collected(snapshot)).decode()
    for family in snapshot:
        if family.kind == "counter":
            # prometheus_client ends the name of every counter in _total. TensorFlow Serving does not.
            for line in ("HELP", "TYPE"):
                text = text.replace(f"# {line} {family.name}_total ", f"# {line} {family.name} ")
    return text


class _Collected(Collector):
    """The metrics of a snapshot as prometheus_client's writer reads them."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        for family in sorted(self._snapshot):
            metric = Metric(family.name, family.description, family.kind)
            for (name, labels), (number,) in self._snapshot[family].items():
                metric.samples.append(Sample(name, dict(labels), number))
            yield metric
