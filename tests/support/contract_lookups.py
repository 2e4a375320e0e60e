"""Two tables, features of several kinds in them, random requests, and the answers that numpy computes."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tensorflow as tf

__all__ = ["CONFIG", "FEATURES", "SHAPES", "Lookups", "answers", "call", "draw", "load", "look_up", "random_rows"]

Array = npt.NDArray[Any]

SHAPES: Final = {"users": (50, 4), "videos": (40, 6)}
"""By table: [rows, dim]."""

FEATURES: Final[Mapping[str, Mapping[str, Any]]] = {
    "user": {"table": "users", "input": "id"},
    "friend": {"table": "users", "input": "id", "out_of_vocabulary": "zeros"},
    "next": {"table": "videos", "input": "id", "out_of_vocabulary": 7},
    "watched": {"table": "videos", "input": "ids", "combiner": "mean", "out_of_vocabulary": "error"},
    "liked": {"table": "videos", "combiner": "sqrtn", "out_of_vocabulary": 3},
    "seen": {"table": "videos", "combiner": "mean", "out_of_vocabulary": "zeros"},
    "follows": {"table": "users", "combiner": "sum", "weighted": True},
    "rated": {"table": "videos", "combiner": "mean", "weighted": True, "out_of_vocabulary": "zeros"},
    "friends": {"table": "users", "combiner": "sqrtn", "weighted": True, "out_of_vocabulary": 0},
    "history": {"table": "videos", "max_sequence_length": 3},
    "steps": {"table": "users", "max_sequence_length": 6, "out_of_vocabulary": "zeros"},
}
"""By name. A feature without `input` takes lists of ids, and one without `out_of_vocabulary` refuses ids outside its table."""

CONFIG: Final = {"features": FEATURES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookups:
    """A checkpoint of the tables in SHAPES, and the export of FEATURES from it.

    Attributes:
        prefix: The checkpoint.
        rows: The rows of each table.
        model_dir: Holds the export as version 1.
    """

    prefix: Path
    rows: Mapping[str, Array]
    model_dir: Path

    @property
    def version(self) -> Path:
        return self.model_dir / "1"


def random_rows(seed: int = 0) -> dict[str, Array]:
    """Return normal numbers for each table in SHAPES."""
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def draw(features: Mapping[str, Mapping[str, Any]], batch: int, seed: int = 0, hot: int = 4) -> dict[str, Array]:
    """Return the inputs of a request: [batch] or padded [batch, hot] ids, and weights.

    Ids of a feature that takes ids outside its table are outside it now and then.
    """
    random = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for name, spec in features.items():
        rows = SHAPES[spec["table"]][0]
        shape = (batch,) if spec.get("input") == "id" else (batch, hot)
        ids = random.integers(0, rows, shape)
        if spec.get("out_of_vocabulary", "error") != "error":
            strange = random.choice(np.array([rows, rows + 3, 2**40, -2]), shape)
            ids = np.where(random.random(shape) < 0.3, strange, ids)
        if len(shape) == 2:
            ids = np.where(random.random(shape) < 0.3, -1, ids)
            ids[0] = -1  # a row without any id
        found[name] = ids
        if spec.get("weighted"):
            found[f"{name}_weights"] = (random.random(shape) + 0.25).astype(np.float32)
    return found


def look_up(spec: Mapping[str, Any], rows: Array, ids: Array, weights: Array | None = None) -> Array:
    """Return the activations [batch, dim] or [batch, max_sequence_length, dim] of one feature, in float64.

    Each row is computed on its own: its ids without padding, their rows, and the combiner's sum.
    """
    rows = rows.astype(np.float64)
    policy, dim = spec.get("out_of_vocabulary", "error"), rows.shape[1]

    def row(number: int) -> Array:
        if 0 <= number < len(rows):
            return rows[number]
        assert policy != "error", number
        return np.zeros(dim) if policy == "zeros" else rows[policy]

    if spec.get("input") == "id":
        return np.stack([row(number) for number in ids])
    length = spec.get("max_sequence_length", 0)
    weights = np.ones(ids.shape) if weights is None else weights.astype(np.float64)
    found = []
    for numbers, factors in zip(ids, weights, strict=True):
        if length:
            steps = [np.zeros(dim) if number == -1 else row(number) for number in numbers[:length]]
            found.append(np.stack([*steps, *[np.zeros(dim)] * (length - len(steps))]))
            continue
        present = [(row(number), factor) for number, factor in zip(numbers, factors, strict=True) if number != -1]
        total = sum((value * factor for value, factor in present), np.zeros(dim))
        kept = np.array([factor for _, factor in present])
        divisor = {"sum": 1.0, "mean": kept.sum(), "sqrtn": np.sqrt((kept**2).sum())}[spec.get("combiner", "mean")]
        found.append(total / divisor if present else total)
    return np.stack(found)


def load(version: Path) -> Any:
    """Return what TensorFlow loads. Keep it as long as you call it, because it owns the memory of mapped tables."""
    return tf.saved_model.load(str(version))


def call(loaded: Any, inputs: Mapping[str, Any], signature: str = "serving_default") -> dict[str, Array]:
    """Return the outputs of a signature of what `load` returned. A list becomes a tensor of the input's type."""
    function = loaded.signatures[signature]
    types = {name: spec.dtype for name, spec in function.structured_input_signature[1].items()}
    given = {
        name: tf.constant(value, types.get(name) if isinstance(value, list) else None) for name, value in inputs.items()
    }
    return {name: value.numpy() for name, value in function(**given).items()}


def answers(version: Path, inputs: Mapping[str, Any], signature: str = "serving_default") -> dict[str, Array]:
    """Return the outputs of a signature of a version."""
    return call(load(version), inputs, signature)
