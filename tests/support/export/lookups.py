"""Exports of lookups with every option, and random requests for them."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.export.fakes import write_checkpoint
from tests.support.export.overlays import overlays_of_any_size
from tpuembed import export_saved_model
from tpuembed.checkpoint.tools import read_rows
from tpuembed.manifest import Manifest

Array = npt.NDArray[Any]

SIZES = {"a": (40, 7), "b": (70, 7), "c": (90, 33), "d": (20, 200), "e": (30, 1)}
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "error": {},
    "zeros": {"out_of_vocabulary": "zeros"},
    "row": {"out_of_vocabulary": 9},
}
_ROWS = {"c": 70}
"""Table -> the row of the policy `row`, if not 9."""


def features(*, weighted: bool, tables: Collection[str] = SIZES) -> dict[str, dict[str, Any]]:
    """Return features of all kinds, combiners and policies in `tables`; those with weights are left out on request."""
    found: dict[str, dict[str, Any]] = {}
    combiners = ["sum", "mean", "sqrtn"]
    for number, table in enumerate(SIZES):
        for index, (policy, options) in enumerate(POLICIES.items()):
            options = {"table": table, **options}
            if policy == "row":
                options["out_of_vocabulary"] = _ROWS.get(table, 9)
            combiner = combiners[(number + index) % 3]
            found[f"{table}_{policy}_list"] = options | {"combiner": combiner}
            if table in "abd":
                found[f"{table}_{policy}_id"] = options | {"input": "id"}
            if index == number % 3:
                found[f"{table}_{policy}_again"] = options | {"combiner": combiner}
                found[f"{table}_{policy}_seq"] = options | {"max_sequence_length": 1 + number % 4}
            if weighted and index == (number + 1) % 3:
                found[f"{table}_{policy}_weighted"] = options | {"combiner": combiner, "weighted": True}
    return {name: spec for name, spec in found.items() if spec["table"] in tables}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An export, and what its tables hold as float32, from the first exported row on."""

    path: Path
    manifest: Manifest
    features: Mapping[str, Mapping[str, Any]]
    rows: Mapping[str, Array]

    def count(self, feature: str) -> int:
        return len(self.rows[self.features[feature]["table"]])


def random_tables(storage: str, seed: int) -> dict[str, Array]:
    """Return tables of normal numbers; NaN, infinities and zeros too, where `storage` holds them."""
    random = np.random.default_rng(seed)
    found = {name: random.normal(size=(rows, dim)).astype(np.float32) for name, (rows, dim) in SIZES.items()}
    for values in found.values():
        values[:: len(values) // 3] *= 1000
        values[11] = 0
    if storage != "int8":
        found["a"][3, 2], found["d"][5, -1], found["d"][6, 0], found["b"][20] = np.nan, np.inf, -np.inf, np.nan
    else:
        found["a"][3] = np.linspace(-127, 127, 7)  # codes at both bounds
    return found


@overlays_of_any_size()
def write(
    folder: Path, storage: str, *, weighted: bool, overlay: bool = False, tables: Collection[str] = SIZES
) -> Case:
    """Write an export of layout mmap, perhaps with an `overlay` of rows that changed."""
    of_all = features(weighted=weighted, tables=tables)
    options: dict[str, Any] = {"serving_config": {"features": of_all}, "storage": storage, "layout": "mmap"}
    values = random_tables(storage, 1)
    write_checkpoint(folder / "ckpt", values)
    report = export_saved_model(folder / "ckpt", folder / "m", **options)
    if overlay:
        other = random_tables(storage, 2)
        for name, table in values.items():
            changed = np.random.default_rng(3).random(len(table)) < 0.3
            table[changed] = other[name][changed]
        write_checkpoint(folder / "ckpt", values)
        report = export_saved_model(folder / "ckpt", folder / "m", base="latest", **options)
        assert report.base is not None
    manifest = Manifest.read(report.path)
    assert manifest is not None
    rows = {}
    for entry in manifest.tables:
        rows[entry.name] = read_rows(report.path, entry.name, 0, entry.rows).values
    return Case(path=report.path, manifest=manifest, features=of_all, rows=rows)


def request(
    case: Case, random: np.random.Generator, batch: int, hot: int, *, one_width: bool = False
) -> dict[str, Array]:
    """Return inputs of all features: ids outside where a policy takes them, padding, and weights of all kinds."""
    found: dict[str, Array] = {}
    for name, spec in case.features.items():
        count, width = case.count(name), hot if one_width else int(random.integers(0, hot + 1))
        shape = (batch,) if spec.get("input") == "id" else (batch, width)
        ids = random.integers(0, count, shape)
        if "out_of_vocabulary" in spec:
            strange = random.choice(np.array([-(2**63), -7, count, 2**63 - 1]), shape)
            ids = np.where(random.random(shape) < 0.2, strange, ids)
            if spec.get("input") == "id":
                ids = np.where(random.random(shape) < 0.1, -1, ids)
        if len(shape) == 2:
            ids = np.where(random.random(shape) < random.choice([0, 0.3, 0.9]), -1, ids)
        found[name] = ids
        if spec.get("weighted"):
            weights = random.choice(
                np.array([0, 0.5, 1, -1, 3, np.nan, np.inf], np.float32),
                shape,
                p=[0.1, 0.3, 0.2, 0.1, 0.26, 0.02, 0.02],
            )
            found[f"{name}_weights"] = weights.astype(np.float32)
    return found
