"""A whole model whose features take names, in every way that the signature `from_activations` accepts, and numpy's lookup."""

from collections.abc import Mapping
from typing import Any, Final

import keras
import numpy as np
import numpy.typing as npt

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, Vocabulary

__all__ = ["FEATURES", "NAMES", "build", "draw", "look_up", "rows_of"]

Array = npt.NDArray[Any]

USERS: Final = [b"\0", b"a\0b", b"\xff\xfe", "naïve".encode(), b"x" * (1 << 16), *(b"user %d" % n for n in range(60))]
ITEMS: Final = [2**63 - 1, -(2**63), -2, 0, 2**53 + 1, *range(100, 140)]
NAMES: Final[Mapping[str, list[Any]]] = {"users": USERS, "items": ITEMS}
BUCKETS: Final = {"users": 0, "items": 2}
UNKNOWN: Final[Mapping[str, list[Any]]] = {
    "users": [b"nobody", b"\0\0", b"x" * 99],
    "items": [-3, 5, 2**53, -(2**62)],
}
FEATURES: Final[Mapping[str, Mapping[str, Any]]] = {
    "user": {"table": "users", "ids": "user", "policy": "error"},
    "user_or_none": {"table": "users", "ids": "pair", "policy": "zeros"},
    "friends": {"table": "users", "ids": "friends", "policy": 9, "combiner": "sum"},
    "steps": {"table": "users", "ids": "friends", "policy": "zeros", "length": 2},
    "heavy": {"table": "users", "ids": "heavy", "suffix": "_again", "policy": "zeros", "combiner": "mean"},
    "item": {"table": "items", "ids": "item", "policy": "error"},
    "items": {"table": "items", "ids": "items", "policy": "error", "combiner": "sqrtn"},
    "row": {"table": "rows", "ids": "row", "policy": "error"},
}
"""By name: the table, the input, and how its names are looked up."""


def build(seed: int = 0) -> Any:
    """Return a functional model whose outputs are its activations."""
    keras.utils.set_random_seed(seed)
    names = {
        table: Vocabulary(of, dtype="string" if table == "users" else "int64", oov_buckets=BUCKETS[table])
        for table, of in NAMES.items()
    }

    def config(name: str) -> FeatureConfig:
        spec = FEATURES[name]
        table, combiner = spec["table"], spec.get("combiner", "mean")
        made = TableConfig(70, 4, _table_of(spec), combiner=combiner)
        return FeatureConfig(
            tables.setdefault(made.name, made),
            max_sequence_length=spec.get("length", 0),
            out_of_vocabulary=spec["policy"],
            vocabulary=names.get(table),
        )

    tables: dict[str, TableConfig] = {}
    inputs = {
        "user": keras.Input((), dtype="string", name="user"),
        "pair": keras.Input((2,), dtype="string", name="pair"),
        "friends": keras.Input((None,), dtype="string", ragged=True, name="friends"),
        "heavy": keras.Input((None,), dtype="string", ragged=True, name="heavy"),
        "heavy_weights": keras.Input((None,), dtype="float32", ragged=True, name="heavy_weights"),
        "item": keras.Input((), dtype="int64", name="item"),
        "items": keras.Input((None,), dtype="int64", sparse=True, name="items"),
        "row": keras.Input((), dtype="int64", name="row"),
    }
    first = TPUEmbedding({name: config(name) for name in FEATURES if name != "heavy"}, optimizer="sgd", name="first")
    found = first({name: inputs[spec["ids"]] for name, spec in FEATURES.items() if name != "heavy"})
    second = TPUEmbedding({"heavy": config("heavy")}, optimizer="sgd", name="second")
    found |= second({"heavy": inputs["heavy"]}, {"heavy": inputs["heavy_weights"]})
    return keras.Model(inputs, {f"{n}_out": keras.layers.Identity(name=f"{n}_out")(v) for n, v in found.items()})


def rows_of(model: Any) -> dict[str, Array]:
    """Return the rows of the table of each feature."""
    layers = [layer for layer in model.layers if isinstance(layer, TPUEmbedding)]
    tables = {config.name: np.asarray(value) for one in layers for config, value in one.embedding_tables.items()}
    return {name: tables[_table_of(spec)] for name, spec in FEATURES.items()}


def _table_of(spec: Mapping[str, Any]) -> str:
    return f"{spec['table']}_{spec.get('combiner', 'mean')}{spec.get('suffix', '')}"


def draw(random: np.random.Generator, batch: int, hot: int, bad: float = 0.0) -> dict[str, Array]:
    """Return inputs. Names of features without a policy are unknown with the probability `bad`."""
    inputs: dict[str, Array] = {"row": random.integers(0, 70, batch)}
    for name, spec in FEATURES.items():
        ids, table = spec["ids"], spec["table"]
        if ids in inputs:
            continue
        shape: Any = {"user": (batch,), "item": (batch,), "pair": (batch, 2)}.get(ids, (batch, hot))
        kind = object if table == "users" else np.int64
        unknown = bad if name == "user" else 0.2
        known, others = np.array(NAMES[table], kind), np.array(UNKNOWN[table], kind)
        values = np.where(
            random.random(shape) < unknown,
            others[random.integers(0, len(others), shape)],
            known[random.integers(0, len(known), shape)],
        )
        if ids in ("friends", "heavy", "items"):
            is_padding = np.arange(hot) >= random.integers(0, hot + 1, (batch, 1))
            values[is_padding] = b"" if table == "users" else -1
            if ids == "heavy":
                weights = (random.random(shape) + 0.25).astype(np.float32)
                inputs["heavy_weights"] = np.where(is_padding, np.nan, weights).astype(np.float32)
        inputs[ids] = values
    return inputs


def look_up(name: str, rows: Array, inputs: Mapping[str, Array], bucket_of: Any) -> Array:
    """Return the float32 activation of a feature.

    Args:
        name: of the feature.
        rows: of its table.
        inputs: of the model.
        bucket_of: returns the bucket of an unknown integer.
    """
    spec = FEATURES[name]
    table, policy, length = spec["table"], spec["policy"], spec.get("length", 0)
    numbers = {known: BUCKETS[table] + number for number, known in enumerate(NAMES.get(table, ()))}
    padding = b"" if table == "users" else -1
    is_list = bool(length or "combiner" in spec)

    def row_of(given: Any) -> Array:
        if table == "rows":
            return rows[given].astype(np.float64)
        if is_list and given == padding:
            return np.zeros(4)
        if given in numbers:
            return rows[numbers[given]].astype(np.float64)
        if BUCKETS[table]:
            return rows[bucket_of(given)].astype(np.float64)
        return rows[policy].astype(np.float64) if isinstance(policy, int) else np.zeros(4)

    given = inputs[spec["ids"]]
    found = np.array([row_of(one) for one in given.reshape(-1).tolist()]).reshape(*given.shape, 4)
    if length:
        found = np.concatenate([found, np.zeros((len(given), length, 4))], 1)[:, :length]
    elif is_list:
        present = given != padding
        weights = np.where(present, inputs["heavy_weights"], 0) if name == "heavy" else present.astype(np.float64)
        divisor = {"sum": np.ones(len(given)), "mean": weights.sum(1), "sqrtn": np.sqrt((weights**2).sum(1))}
        found = (found * weights[..., None]).sum(1) / np.maximum(divisor[spec["combiner"]], 1e-9)[:, None]
    return found.astype(np.float32)
