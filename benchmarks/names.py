"""One training step of the layer with names, beside the same step with row numbers, and with Keras' StringLookup before it.

    python -m benchmarks.names [--rounds N] [--rows N]

One process has all layers: a table of width 64 with Adam, a `tf.function`, the same rows. The steps run in turns, from another one
on in each turn. Each number is the median of all steps. Strings are made before the steps.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

DIM, BATCHES = 64, 4
IDS = (4_096, 65_536)
SECONDS = 10.0


def run(rounds: int = 3, rows: int = 1_000_000) -> dict[str, Any]:
    """Measure a step of each number of ids."""
    found: dict[str, Any] = {"rows": rows, "dim": DIM, "optimizer": "adam", "rounds": rounds}
    for ids in IDS:
        steps = _steps(rows, ids)
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, seconds in _in_turns(steps).items():
                taken[name] += seconds
        medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
        found[f"{ids} ids"] = {
            **{f"{name} ms": round(1e3 * seconds, 3) for name, seconds in medians.items()},
            **{
                f"{name} / ids": round(seconds / medians["ids"], 3)
                for name, seconds in medians.items()
                if name != "ids"
            },
        }
    return found


def _in_turns(steps: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    for step in steps.values():
        for _ in range(BATCHES):
            step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    stop, names = time.perf_counter() + SECONDS, list(steps)
    for turn in itertools.count():
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            started = time.perf_counter()
            steps[name]()
            taken[name].append(time.perf_counter() - started)
        if time.perf_counter() > stop:
            return taken
    raise AssertionError("the count never ends")


def _steps(rows: int, ids: int) -> dict[str, Callable[[], None]]:
    import keras
    import numpy as np
    import tensorflow as tf

    from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, Vocabulary

    numbers = np.arange(rows, dtype=np.int64)
    integers = numbers * 1_000_003
    strings = [b"item_%012d" % number for number in integers]
    lookup = keras.layers.StringLookup(vocabulary=tf.constant(strings), num_oov_indices=0)
    random = np.random.default_rng(0)
    picks = [random.integers(0, rows, ids) for _ in range(BATCHES)]
    as_text = np.array(strings, object)

    def step_of(vocabulary: Any, batches: list[Any], before: Callable[[Any], Any] = lambda given: given) -> Any:
        feature = FeatureConfig(TableConfig(rows, DIM, "t"), vocabulary=vocabulary)
        layer = TPUEmbedding(feature, optimizer="adam")
        turns = itertools.cycle(batches)

        @tf.function
        def step(batch: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(layer(before(batch)) - 1.0))
            layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
            return loss

        return lambda: step(next(turns)).numpy()

    texts = [tf.constant(as_text[pick]) for pick in picks]
    return {
        "ids": step_of(None, [tf.constant(numbers[pick]) for pick in picks]),
        "int64 names": step_of(Vocabulary(integers, dtype="int64"), [tf.constant(integers[pick]) for pick in picks]),
        "string names": step_of(Vocabulary(strings), texts),
        "keras StringLookup": step_of(None, texts, lookup),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    print(json.dumps(run(options.rounds, options.rows), indent=1))
