"""Three tables that change and grow, requests for every row of them, and the answers of a version."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tests.support.export.fakes import random_table

Array = npt.NDArray[Any]

FEATURES: dict[str, dict[str, Any]] = {
    "user": {"table": "users", "input": "id"},
    "friend": {"table": "users", "input": "id", "out_of_vocabulary": "zeros"},
    "seen": {"table": "videos", "combiner": "sum"},
    "last": {"table": "videos", "max_sequence_length": 3},
    "tag": {"table": "tags", "combiner": "mean", "weighted": True},
}
CONFIG = {"features": FEATURES}
ROWS_ALONE = {"features": {name: {"table": name, "input": "id"} for name in ("users", "videos", "tags")}}
"""For tests of files and rows: this graph is made in a third of the time of CONFIG's."""
PLAIN = {"features": {name: spec for name, spec in FEATURES.items() if not spec.get("weighted")}}
ROWS = {"users": 333, "videos": 200, "tags": 70}
DIMS = {"users": 8, "videos": 8, "tags": 4}  # users and videos share a stack


@contextlib.contextmanager
def overlays_of_any_size() -> Iterator[None]:
    """Write overlays of small tables, in which a few rows are a large share. Also a decorator."""
    with mock.patch("tpuembed.export.overlay.writer.MAX_SHARE", 9.0):
        yield


def tables(rows: Mapping[str, int] = ROWS, seed: int = 0) -> dict[str, Array]:
    return {
        name: random_table(count, DIMS[name], seed=seed + index) for index, (name, count) in enumerate(rows.items())
    }


def changed(values: Mapping[str, Array], random: np.random.Generator, share: float) -> dict[str, Array]:
    """Return copies of the tables in which about `share` of the rows differ, by one bit or by all; rows at the ends too."""
    found = {}
    for name, rows in values.items():
        rows = rows.copy()
        hits = np.flatnonzero(random.random(len(rows)) < share)
        hits = np.union1d(hits, random.choice([0, 63, 64, len(rows) - 1], 1))
        for row in hits:
            if random.random() < 0.5:
                rows[row] = random.normal(size=rows.shape[1])
            else:
                rows[row, -1] = np.nextafter(rows[row, -1], np.float32(9))
        found[name] = rows
    return found


def all_ids(values: Mapping[str, Array], random: np.random.Generator) -> dict[str, Array]:
    """Return inputs that look every row of every table up."""
    batch = max(map(len, values.values()))
    inputs: dict[str, Array] = {}
    for name, spec in FEATURES.items():
        count = len(values[str(spec["table"])])
        ids = np.arange(batch) % count
        if spec.get("input") != "id":
            ids = np.stack([ids, random.integers(-1, count, batch), random.integers(-1, count, batch)], 1)
        inputs[name] = ids
    inputs["friend"] = np.where(random.random(batch) < 0.1, len(values["users"]) + 5, inputs["friend"])
    inputs["tag_weights"] = random.random(inputs["tag"].shape).astype(np.float32)
    return inputs


def every_row(values: Mapping[str, Array]) -> dict[str, Array]:
    """Return the inputs of ROWS_ALONE that look every row of every table up."""
    batch = max(map(len, values.values()))
    return {name: np.arange(batch) % len(rows) for name, rows in values.items()}


def answers(version: Path, inputs: Mapping[str, Array], signature: str = "serving_default") -> dict[str, Array]:
    loaded = tf.saved_model.load(str(version))
    found = loaded.signatures[signature](**{name: tf.constant(value) for name, value in inputs.items()})
    return {name: value.numpy() for name, value in found.items()}


def assert_same(one: Mapping[str, Array], other: Mapping[str, Array]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.tobytes() == other[name].tobytes(), name
