"""Two towers on MovieLens 100K: the layer beside TensorFlow Recommenders' tutorial "basic retrieval".

    python -m benchmarks.two_towers RATINGS [--seeds N] [--tfrs-python PYTHON] [--tfrs-path FOLDER]

Both train 3 epochs on the same 80,000 pairs of each seed, and are measured on the other 20,000: how often the movie is among the
user's best k of all movies. Embeddings of 32, Adagrad with a rate of 0.1, batches of 8,192, the sum of the losses, as the tutorial.
TensorFlow Recommenders needs Keras 2, so it runs in its own process: PYTHON of an environment with tensorflow, tf_keras and
tensorflow-recommenders, or this one with their FOLDER.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

KS = (1, 5, 10, 50, 100)
EPOCHS, BATCH, DIM = 3, 8192, 32


def run(ratings: str, seeds: int = 5, tfrs_python: str | None = None, tfrs_path: str = "") -> dict[str, Any]:
    """Train and measure both, in turns."""
    from tpuembed_cli.ratings import data

    loaded = data.load(Path(ratings))
    found: dict[str, list[dict[str, float]]] = {"tpuembed": []}
    if tfrs_python:
        found["TensorFlow Recommenders"] = []
    for seed in range(seeds):
        train, test = data.split(loaded, seed)
        with tempfile.TemporaryDirectory(prefix="tpuembed-bench-") as folder:
            np.savez(
                f"{folder}/pairs.npz",
                users=train.users,
                items=train.items,
                test_users=test.users,
                test_items=test.items,
            )
            for kind, each in found.items():
                command, extra = [sys.executable, "-m", "benchmarks.two_towers"], dict[str, str]()
                if kind != "tpuembed":
                    command = [str(tfrs_python), __file__]
                    extra = {"TF_USE_LEGACY_KERAS": "1", "PYTHONPATH": tfrs_path}
                done = subprocess.run(
                    [*command, "--measure", kind, folder, str(seed)],
                    stdout=subprocess.PIPE,
                    check=True,
                    env=os.environ | extra,
                    cwd=Path(__file__).parents[1],
                )
                each.append(json.loads(done.stdout.splitlines()[-1]))
    summary = {
        kind: {
            key: {
                "mean": round(statistics.mean(one[key] for one in each), 5),
                "spread": round(max(one[key] for one in each) - min(one[key] for one in each), 5),
            }
            for key in each[0]
        }
        for kind, each in found.items()
    }
    return {"ratings": "MovieLens 100K", "seeds": seeds, "epochs": EPOCHS, "batch": BATCH, **summary}


def measure_ours(pairs: Any, seed: int) -> dict[str, float]:
    """Train two towers of this layer, with the other movies of the batch as negatives."""
    import keras
    import tensorflow as tf

    from tpuembed import Adagrad, FeatureConfig, TableConfig, TPUEmbedding
    from tpuembed.retrieval.training import FactorizedTopK, in_batch_softmax

    keras.utils.set_random_seed(seed)
    users, items = (np.concatenate([pairs[name], pairs[f"test_{name}"]]) for name in ("users", "items"))

    def tower(name: str, rows: int) -> Any:
        uniform = keras.initializers.RandomUniform()
        table = TableConfig(rows, DIM, f"{name}_table", initializer=uniform, optimizer=Adagrad(0.1))
        ids = keras.Input((), dtype="int64", name=name)
        return keras.Model({name: ids}, TPUEmbedding({name: FeatureConfig(table)})({name: ids})[name])

    class TwoTowers(keras.Model):
        measures = False

        def __init__(self) -> None:
            super().__init__()
            self.query, self.candidate = tower("users", int(users.max()) + 1), tower("items", int(items.max()) + 1)
            movies = tf.data.Dataset.from_tensor_slices(np.unique(items)).batch(128)
            self.top_k = FactorizedTopK(movies.map(lambda ids: (ids, self.candidate({"items": ids}))), ks=KS)

        def call(self, inputs: Any) -> Any:
            return self.query({"users": inputs["users"]}), self.candidate({"items": inputs["items"]})

        def compute_loss(self, y_pred: Any = None, **_: Any) -> Any:
            return tf.reduce_sum(in_batch_softmax(*y_pred))

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            del y, sample_weight
            if self.measures:
                self.top_k.update_state(y_pred[0], x["items"])
            return self.get_metrics_result()

    model = TwoTowers()
    model.compile()
    data = {"users": pairs["users"], "items": pairs["items"]}
    started = time.perf_counter()
    dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(len(users), seed=42).batch(BATCH)
    model.fit(dataset, epochs=EPOCHS, verbose=0, shuffle=False)
    seconds = time.perf_counter() - started
    model.measures = True
    model.compile()
    test = {"users": pairs["test_users"], "items": pairs["test_items"]}
    found = model.evaluate(test, batch_size=4096, return_dict=True, verbose=0)
    return {"train s": seconds} | {
        f"top {k}": float(found[f"factorized_top_k/top_{k}_categorical_accuracy"]) for k in KS
    }


def measure_tfrs(pairs: Any, seed: int) -> dict[str, float]:
    """Train the tutorial's model, written anew, without metrics in training."""
    import tensorflow as tf
    import tensorflow_recommenders as tfrs

    tf.keras.utils.set_random_seed(seed)
    named = {name: pairs[name].astype(str).astype(object) for name in pairs.files}
    users, items = (np.unique(np.concatenate([named[one], named[f"test_{one}"]])) for one in ("users", "items"))

    def tower(names: Any) -> Any:
        lookup = tf.keras.layers.StringLookup(vocabulary=names, mask_token=None)
        return tf.keras.Sequential([lookup, tf.keras.layers.Embedding(len(names) + 1, DIM)])

    class Model(tfrs.Model):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = tower(users), tower(items)
            candidates = tf.data.Dataset.from_tensor_slices(items).batch(128).map(self.item)
            metric = tfrs.metrics.FactorizedTopK(candidates=candidates, ks=KS)
            self.task = tfrs.tasks.Retrieval(metrics=metric)

        def compute_loss(self, features: Any, training: bool = False) -> Any:
            return self.task(self.user(features["users"]), self.item(features["items"]), compute_metrics=not training)

    model = Model()
    model.compile(optimizer=tf.keras.optimizers.Adagrad(learning_rate=0.1))
    data = [
        tf.data.Dataset.from_tensor_slices({"users": named[f"{part}users"], "items": named[f"{part}items"]})
        for part in ("", "test_")
    ]
    started = time.perf_counter()
    model.fit(data[0].shuffle(100_000, seed=42).batch(BATCH), epochs=EPOCHS, verbose=0)
    seconds = time.perf_counter() - started
    found = model.evaluate(data[1].batch(4096), return_dict=True, verbose=0)
    return {
        "train s": seconds,
        **{f"top {k}": float(found[f"factorized_top_k/top_{k}_categorical_accuracy"]) for k in KS},
    }


def main() -> None:
    """Print the results as JSON."""
    if sys.argv[1:2] == ["--measure"]:
        _, _, kind, folder, seed = sys.argv
        measured = measure_ours if kind == "tpuembed" else measure_tfrs
        print(json.dumps(measured(np.load(f"{folder}/pairs.npz", allow_pickle=False), int(seed))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ratings")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tfrs-python")
    parser.add_argument("--tfrs-path", default="")
    print(json.dumps(run(**vars(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
