"""Two towers on MovieLens 100K: `tpuembed demo --retrieval` beside TensorFlow Recommenders' tutorial "basic retrieval".

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
    """Train the demo's model."""
    import keras

    from tpuembed_cli.ratings.data import Ratings
    from tpuembed_cli.ratings.retrieval import TwoTowers, measure, train

    keras.utils.set_random_seed(seed)
    training, test = (
        Ratings(pairs[f"{part}users"], pairs[f"{part}items"], np.zeros(len(pairs[f"{part}users"]), np.float32))
        for part in ("", "test_")
    )
    every = [np.concatenate([getattr(training, name), getattr(test, name)]) for name in ("users", "items")]
    model = TwoTowers(int(every[0].max()) + 1, int(every[1].max()) + 1, np.unique(every[1]))
    started = time.perf_counter()
    train(model, training, EPOCHS, lambda _: None)
    seconds = time.perf_counter() - started
    return {"train s": seconds, **{f"top {k}": share for k, share in measure(model, test).items()}}


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
