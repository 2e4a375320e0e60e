"""Writes tests/golden/keras_rs_training: what keras-rs' DistributedEmbedding on TensorFlow trains and predicts; see README.md.

`Model` is told where to find keras-rs' names, so that the test runs this very code with the import changed.
"""

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np

FOLDER = Path(__file__).parent / "keras_rs_training"
BATCH, STEPS = 4, 24
TABLES = {"video": (30, 4, "mean"), "user": (20, 3, "sum"), "tag": (12, 2, "sqrtn")}
FEATURES = {"watched": ("video", 3), "fav": ("video", None), "user": ("user", None), "tags": ("tag", 2)}
"""Feature -> its table, and the ids of an example; None for one without a dimension for it."""
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.3),
    "adagrad": lambda: keras.optimizers.Adagrad(0.3),
}
"""Those of which an update of all rows, keras-rs' off the TPU, moves the rows of the batch alone."""
REPEATED = ("sgd",)
"""Those trained on ids that are more than once in a batch, of which Keras' Adagrad adds up the squares, and TPUs square the sum."""


class Model(keras.Model):
    """Features with weights, a dense layer on their activations."""

    def __init__(self, keras_rs: Any, optimizer: Any) -> None:
        super().__init__()
        tables = {
            name: keras_rs.layers.TableConfig(
                name=name, vocabulary_size=rows, embedding_dim=dim, combiner=combiner, optimizer=optimizer()
            )
            for name, (rows, dim, combiner) in TABLES.items()
        }
        configs = {
            name: keras_rs.layers.FeatureConfig(
                name=name,
                table=tables[table],
                input_shape=(BATCH,) if hot is None else (BATCH, hot),
                output_shape=(BATCH, TABLES[table][1]),
            )
            for name, (table, hot) in FEATURES.items()
        }
        self.embedding_layer = keras_rs.layers.DistributedEmbedding(feature_configs=configs)
        self.score = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        rows = self.embedding_layer(inputs["ids"], inputs["weights"])
        return self.score(keras.ops.concatenate([rows[name] for name in sorted(FEATURES)], axis=1))


def data(repeated: bool) -> tuple[Any, Any]:
    """(inputs, labels) of all steps; without `repeated` no row of a table is looked up twice in a step."""
    random = np.random.default_rng(3)
    ids: dict[str, list[Any]] = {name: [] for name in FEATURES}
    for _ in range(STEPS):
        left = {table: random.permutation(rows) for table, (rows, _, _) in TABLES.items()}
        for name, (table, hot) in FEATURES.items():
            count = BATCH * (hot or 1)
            drawn, left[table] = left[table][:count], left[table][count:]
            drawn = random.integers(0, TABLES[table][0], count) if repeated else drawn
            ids[name].append(drawn.reshape((BATCH,) if hot is None else (BATCH, hot)))
    joined = {name: np.concatenate(parts).astype(np.int32) for name, parts in ids.items()}
    weights = {name: random.uniform(0.5, 2.0, array.shape).astype(np.float32) for name, array in joined.items()}
    return {"ids": joined, "weights": weights}, random.uniform(size=(BATCH * STEPS, 1)).astype(np.float32)


def trained(model: Any, name: str) -> dict[str, Any]:
    """`fit` by the optimizer of that name, for two epochs: losses and predictions."""
    inputs, labels = data(name in REPEATED)
    first = keras.tree.map_structure(lambda array: array[:BATCH], inputs)
    model(first)
    set_weights(model, start())
    before = np.asarray(model(first))
    model.compile(OPTIMIZERS[name](), "mse")
    history = model.fit(inputs, labels, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    predictions = model.predict(inputs, batch_size=BATCH, verbose=0)
    return {"before": before, "losses": np.array(history.history["loss"]), "predictions": predictions}


def start() -> dict[str, Any]:
    """Tables by name, and the dense layer's kernel, to begin with."""
    random = np.random.default_rng(4)
    width = sum(TABLES[table][1] for table, _ in FEATURES.values())
    tables = {name: random.normal(size=(rows, dim)) / 2 for name, (rows, dim, _) in TABLES.items()}
    return {
        name: array.astype(np.float32) for name, array in {**tables, "kernel": random.normal(size=(width, 1))}.items()
    }


def set_weights(model: Any, values: dict[str, Any]) -> None:
    """On either implementation; keras-rs on TensorFlow has no set_embedding_tables."""
    tables = {name: values[name] for name in TABLES}
    if hasattr(model.embedding_layer, "set_embedding_tables"):
        model.embedding_layer.set_embedding_tables(tables)
    else:
        for name, variable in model.embedding_layer.get_embedding_tables().items():
            variable.assign(tables[name])
    model.score.kernel.assign(values["kernel"])


def main() -> None:
    import keras_rs

    FOLDER.mkdir(exist_ok=True)
    for name, optimizer in OPTIMIZERS.items():
        model = Model(keras_rs, optimizer)
        found = trained(model, name)
        tables = {table: np.asarray(rows) for table, rows in model.embedding_layer.get_embedding_tables().items()}
        arrays: dict[str, Any] = {**found, **tables}
        np.savez(FOLDER / f"{name}.npz", **arrays)
        print(name, json.dumps(found["losses"].tolist()))


if __name__ == "__main__":
    main()
