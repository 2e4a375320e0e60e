"""A whole model with every kind of lookup that the signature `from_activations` takes, and numpy's own lookup of its rows."""

from collections.abc import Collection, Mapping
from typing import Any, Final

import keras
import numpy as np
import numpy.typing as npt

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

__all__ = ["DENSE", "FEATURES", "SIZES", "build", "draw", "look_up", "rows_of"]

Array = npt.NDArray[Any]

SIZES: Final = {"a": (40, 4), "b": (30, 4), "c": (300, 9), "d": (200, 9), "e": (50, 4)}
DENSE: Final = "price"
FEATURES: Final[Mapping[str, Mapping[str, Any]]] = {
    "one": {"table": "a", "ids": "one"},
    "one_again": {"table": "c", "ids": "one", "policy": "zeros"},
    "pair": {"table": "b", "ids": "pair", "policy": 5},
    "triples": {"table": "a", "ids": "triples"},
    "ragged": {"table": "a", "ids": "ragged", "combiner": "sum"},
    "sparse": {"table": "b", "ids": "sparse", "combiner": "mean", "policy": "zeros"},
    "rest": {"table": "c", "ids": "sparse", "combiner": "sqrtn", "policy": 7},
    "history": {"table": "b", "ids": "ragged", "length": 3, "policy": "zeros"},
    "steps": {"table": "c", "ids": "sparse", "length": 2, "policy": "zeros"},
    "heavy": {"table": "d", "ids": "heavy", "weights": "heavy_weights", "combiner": "mean", "policy": "zeros"},
    "light": {"table": "e", "ids": "light", "weights": "light_weights", "combiner": "sqrtn"},
}
"""By name: the table, the inputs, and how the ids are looked up."""


def build(seed: int = 0, *, is_lazy: bool = False, names: Collection[str] = tuple(FEATURES)) -> Any:
    """Return a functional model of two layers.

    Args:
        seed: of its weights.
        is_lazy: whether its outputs are the activations, without a dense part.
        names: its features.
    """
    keras.utils.set_random_seed(seed)
    configs: dict[tuple[str, str], Any] = {}

    def config(name: str) -> FeatureConfig:
        spec = FEATURES[name]
        key = spec["table"], spec.get("combiner", "mean")
        rows, dim = SIZES[spec["table"]]
        made = configs.setdefault(key, TableConfig(rows, dim, "_".join(key), combiner=key[1]))
        policy = spec.get("policy", "error")
        return FeatureConfig(made, max_sequence_length=spec.get("length", 0), out_of_vocabulary=policy)

    inputs = {
        "one": keras.Input((), dtype="int64", name="one"),
        "pair": keras.Input((2,), dtype="int32", name="pair"),
        "triples": keras.Input((None, 3), dtype="int64", name="triples"),
        "ragged": keras.Input((None,), dtype="int64", ragged=True, name="ragged"),
        "sparse": keras.Input((None,), dtype="int64", sparse=True, name="sparse"),
        "heavy": keras.Input((None,), dtype="int64", ragged=True, name="heavy"),
        "heavy_weights": keras.Input((None,), dtype="float32", ragged=True, name="heavy_weights"),
        "light": keras.Input((None,), dtype="int64", sparse=True, name="light"),
        "light_weights": keras.Input((None,), dtype="float32", sparse=True, name="light_weights"),
    }
    used = {spec[key] for name, spec in FEATURES.items() if name in names for key in ("ids", "weights") if key in spec}
    inputs = {name: value for name, value in inputs.items() if name in used}
    price = keras.Input((2,), dtype="float32", name=DENSE)
    weighted = [name for name, spec in FEATURES.items() if name in names and "weights" in spec]
    plain = [name for name in FEATURES if name in names and name not in weighted]
    found: dict[str, Any] = {}
    if plain:
        first = TPUEmbedding({name: config(name) for name in plain}, optimizer="sgd", name="first")
        found |= first({name: inputs[FEATURES[name]["ids"]] for name in plain})
    if weighted:
        second = TPUEmbedding({name: config(name) for name in weighted}, optimizer="sgd", name="second")
        weights = {name: inputs[f"{name}_weights"] for name in weighted}
        found |= second({name: inputs[name] for name in weighted}, weights)
    if is_lazy:
        outputs = {f"{name}_out": keras.layers.Identity(name=f"{name}_out")(value) for name, value in found.items()}
        return keras.Model({**inputs, DENSE: price}, {**outputs, "price_out": price * 2})
    flat = [keras.ops.sum(value, axis=range(1, len(value.shape) - 1)) for value in found.values()]
    hidden = keras.layers.Dense(8, activation="tanh", name="hidden")(keras.ops.concatenate([*flat, price], -1))
    return keras.Model({**inputs, DENSE: price}, {"score": keras.layers.Dense(1, name="score")(hidden)})


def rows_of(model: Any) -> dict[str, Array]:
    """Return the rows of the table of each feature."""
    layers = [layer for layer in model.layers if isinstance(layer, TPUEmbedding)]
    tables = {config.name: value for layer in layers for config, value in layer.embedding_tables.items()}
    return {
        name: np.asarray(tables[f"{spec['table']}_{spec.get('combiner', 'mean')}"]) for name, spec in FEATURES.items()
    }


def draw(random: np.random.Generator, batch: int, hot: int, bad: float = 0.0) -> dict[str, Array]:
    """Return inputs. Ids of features with a policy may be outside their tables, and of the others with the probability `bad`."""
    shapes: dict[str, Any] = {"one": (batch,), "pair": (batch, 2), "triples": (batch, hot, 3)}
    inputs: dict[str, Array] = {DENSE: random.normal(size=(batch, 2)).astype(np.float32)}
    for ids in ("one", "pair", "triples", "ragged", "sparse", "heavy", "light"):
        users = [spec for spec in FEATURES.values() if spec["ids"] == ids]
        rows = min(SIZES[spec["table"]][0] for spec in users)
        outside = bad if any("policy" not in spec for spec in users) else 0.2
        shape = shapes.get(ids, (batch, hot))
        values = random.integers(0, rows, shape)
        values = np.where(random.random(shape) < outside, random.choice([10**6, -2, -(2**31)], shape), values)
        if ids not in shapes:
            is_padding = np.arange(hot) >= random.integers(0, hot + 1, (batch, 1))
            values = np.where(is_padding, -1, values)
            if ids in ("heavy", "light"):
                weights = (random.random(shape) + 0.25).astype(np.float32)
                inputs[f"{ids}_weights"] = np.where(is_padding, random.choice([0, np.nan]), weights).astype(np.float32)
        inputs[ids] = values.astype(np.int32) if ids == "pair" else values
    return inputs


def look_up(name: str, rows: Array, inputs: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return the float64 activation of a feature, and the sum of |weight x value|, divided alike."""
    spec, ids = FEATURES[name], inputs[FEATURES[name]["ids"]]
    policy = spec.get("policy", "error")
    is_inside = (ids >= 0) & (ids < len(rows))
    found = rows.astype(np.float64)[np.where(is_inside, ids, policy if isinstance(policy, int) else 0)]
    if policy == "zeros":
        found = np.where(is_inside[..., None], found, 0.0)
    if "combiner" not in spec and "length" not in spec:
        return found, np.abs(found)
    present = ids != -1
    found = np.where(present[..., None], found, 0.0)
    if length := spec.get("length"):
        found = np.concatenate([found, np.zeros((len(ids), length, rows.shape[1]))], 1)[:, :length]
        return found, np.abs(found)
    weights = np.where(present, inputs[spec["weights"]] if "weights" in spec else 1.0, 0.0).astype(np.float64)
    divisor = {"sum": np.ones(len(ids)), "mean": weights.sum(1), "sqrtn": np.sqrt((weights**2).sum(1))}[
        spec["combiner"]
    ]
    divisor = np.where(divisor == 0, 1, divisor)[:, None]
    products = found * weights[..., None]
    return products.sum(1) / divisor, np.abs(products).sum(1) / divisor
