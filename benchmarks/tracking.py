"""One training step of the layer with `track_rows=True`, beside the same step without.

    python -m benchmarks.tracking [--rounds N] [--rows N]

One process has both layers: a table of width 64 with Adam, a `tf.function`, the same ids. The steps run in turns, the second of a
pair first in the next one. Each number is the median of all steps.
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


def run(rounds: int = 3, rows: int = 2_600_000) -> dict[str, Any]:
    """Measure a step of each number of ids."""
    found: dict[str, Any] = {"rows": rows, "dim": DIM, "optimizer": "adam", "rounds": rounds}
    for ids in IDS:
        steps = {name: _step(rows, ids, track_rows=name == "tracked") for name in ("plain", "tracked")}
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, seconds in _in_turns(steps).items():
                taken[name] += seconds
        medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
        found[f"{ids} ids"] = {
            **{f"{name} ms": round(1e3 * seconds, 3) for name, seconds in medians.items()},
            "tracked / plain": round(medians["tracked"] / medians["plain"], 3),
        }
    return found


def _in_turns(steps: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    for step in steps.values():
        for _ in range(BATCHES):
            step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    stop = time.perf_counter() + SECONDS
    for turn in itertools.count():
        for name in sorted(steps, reverse=turn % 2 == 1):
            started = time.perf_counter()
            steps[name]()
            taken[name].append(time.perf_counter() - started)
        if time.perf_counter() > stop:
            return taken
    raise AssertionError("the count never ends")


def _step(rows: int, ids: int, *, track_rows: bool) -> Callable[[], None]:
    import numpy as np
    import tensorflow as tf

    from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

    layer = TPUEmbedding(FeatureConfig(TableConfig(rows, DIM, "t")), optimizer="adam", track_rows=track_rows)
    random = np.random.default_rng(0)
    batches = itertools.cycle([tf.constant(random.integers(0, rows, ids), tf.int64) for _ in range(BATCHES)])

    @tf.function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(batch) - 1.0))
        layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
        return loss

    return lambda: step(next(batches)).numpy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2_600_000)
    options = parser.parse_args()
    print(json.dumps(run(options.rounds, options.rows), indent=1))
