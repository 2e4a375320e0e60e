"""One training step of the layer beside what else trains an embedding table in Keras 3, as the vocabulary grows.

    python benchmarks/train_step.py [--rounds N] [--vocabulary N]... [--optimizer NAME]...

Contenders: this layer, `keras.layers.Embedding`, and keras-rs' `DistributedEmbedding` (extra `bench`; where keras_rs cannot be
imported the output names it as missing). Each looks up 4096 ids, four batches of them in turn, in one table of width 32 in a
`tf.function`, and trains it with the same optimizer: the layer by its own rule, row by row, the others by Keras' on the whole
table. Every measurement is a process of its own; rounds are interleaved, medians reported. A step's time is the median
of the process' steps; its memory is the peak (VmHWM) of creating the table and training it, above the peak of the process once it
has trained a table of ten rows, in tables: 1 for SGD and 3 for Adam would be table and slots and nothing else.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BATCH, DIM, BATCHES = 4096, 32, 4
VOCABULARIES = (10_000, 1_000_000, 10_000_000)
OPTIMIZERS = ("adam", "adagrad")
CONTENDERS = ("tpuembed", "keras", "keras_rs")
SECONDS = 3.0
MEASURABLE_BYTES = 100e6


def run(
    rounds: int = 3, vocabularies: Sequence[int] = VOCABULARIES, optimizers: Sequence[str] = OPTIMIZERS
) -> dict[str, Any]:
    """Per optimizer and vocabulary: "<contender>_ms", "<contender>_peak_tables", and the others' times over the layer's."""
    measured: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    missing: dict[str, str] = {}
    for _, *case in itertools.product(range(rounds), optimizers, vocabularies, CONTENDERS):
        if case[2] not in missing:
            found = _measure_apart(*case)
            if "missing" in found:
                missing[case[2]] = found["missing"]
            else:
                measured.setdefault(tuple(case), []).append(found)  # type: ignore[arg-type]
    report: dict[str, Any] = {"missing": missing} if missing else {}
    for optimizer, vocabulary in itertools.product(optimizers, vocabularies):
        present = [name for name in CONTENDERS if name not in missing]
        rows = {name: measured[optimizer, vocabulary, name] for name in present}
        report[f"{optimizer}, vocabulary {vocabulary}"] = _summary(rows)
    return report


def _summary(rows: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    medians = {
        f"{name}_{key}": statistics.median(row[key] for row in found)
        for name, found in rows.items()
        for key in found[0]
    }
    others = [name for name in rows if name != "tpuembed"]
    return medians | {f"{name} / tpuembed": medians[f"{name}_ms"] / medians["tpuembed_ms"] for name in others}


def _measure_apart(optimizer: str, vocabulary: int, contender: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", contender, optimizer, str(vocabulary)]
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1], check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure(contender: str, optimizer: str, vocabulary: int) -> dict[str, Any]:
    """In a process of its own."""
    try:
        make = MAKERS[contender]
        make(optimizer, 10)()
    except ImportError as error:
        return {"missing": f"{error}; pip install 'tpuembed[bench]'"}
    before = _peak_bytes()
    step = make(optimizer, vocabulary)
    for _ in range(BATCHES):
        step()
    times: list[float] = []
    stop = time.perf_counter() + SECONDS
    while len(times) < 5 or time.perf_counter() < stop:
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    table_bytes = 4 * DIM * vocabulary
    found = {"ms": statistics.median(times) * 1e3}
    if table_bytes >= MEASURABLE_BYTES:
        found["peak_tables"] = (_peak_bytes() - before) / table_bytes
    return found


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def _tpuembed(optimizer: str, vocabulary: int, batch: int = BATCH) -> Callable[[], None]:
    import tensorflow as tf

    from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

    layer = TPUEmbedding(FeatureConfig(TableConfig(vocabulary, DIM, "t")), optimizer=optimizer)

    def update(tape: Any, loss: Any) -> None:
        layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))

    return _loop(tf, layer, update, vocabulary, batch)


def _keras(optimizer: str, vocabulary: int, batch: int = BATCH) -> Callable[[], None]:
    import keras

    layer = keras.layers.Embedding(vocabulary, DIM)
    layer.build()
    return _keras_loop(layer, layer, optimizer, vocabulary, batch)


def _keras_rs(optimizer: str, vocabulary: int, batch: int = BATCH) -> Callable[[], None]:
    from keras_rs.layers import DistributedEmbedding, FeatureConfig, TableConfig

    table = TableConfig("t", vocabulary, DIM, optimizer=optimizer, combiner="sum", placement="default_device")
    layer = DistributedEmbedding({"x": FeatureConfig("x", table, (batch,), (batch, DIM))})
    layer.build({"x": (batch,)})
    return _keras_loop(layer, lambda ids: layer({"x": ids})["x"], optimizer, vocabulary, batch)


MAKERS = {"tpuembed": _tpuembed, "keras": _keras, "keras_rs": _keras_rs}


def _keras_loop(
    layer: Any, look_up: Callable[[Any], Any], optimizer: str, vocabulary: int, batch: int
) -> Callable[[], None]:
    import keras
    import tensorflow as tf

    trainer = keras.optimizers.get(optimizer)
    trainer.build(layer.trainable_variables)

    def update(tape: Any, loss: Any) -> None:
        gradients = tape.gradient(loss, [variable.value for variable in layer.trainable_variables])
        trainer.apply(gradients, layer.trainable_variables)

    return _loop(tf, look_up, update, vocabulary, batch)


def _loop(tf: Any, look_up: Any, update: Callable[[Any, Any], None], vocabulary: int, batch: int) -> Callable[[], None]:
    import numpy as np

    random = np.random.default_rng(0)
    batches = itertools.cycle([tf.constant(random.integers(0, vocabulary, batch), tf.int32) for _ in range(BATCHES)])

    @tf.function
    def step(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(look_up(ids) - 1.0))
        update(tape, loss)
        return loss

    return lambda: step(next(batches)).numpy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, action="append")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, action="append")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        contender, optimizer, rows = options.measure
        print(json.dumps(_measure(contender, optimizer, int(rows))))
    else:
        print(
            json.dumps(
                run(options.rounds, options.vocabulary or VOCABULARIES, options.optimizer or OPTIMIZERS), indent=1
            )
        )
