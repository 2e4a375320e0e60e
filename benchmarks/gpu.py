"""The layer on a GPU beside the same steps on the CPU: their numbers, and what a training step takes of time and memory.

    python -m benchmarks.gpu [--checks | --steps]

The checks build each layer twice, on both devices, and train both on the same random batches. Every optimizer trains dense, sparse
and ragged ids, with weights, of all combiners, and sequences. The steps are those of `train_step.py`, beside Keras' layer and
optimizer. Each contender runs in blocks, in turns with the others. A block ends when its device has finished. Figures are medians
of the blocks. Memory is the peak of creating the table and training it, in tables.
"""

import argparse
import gc
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.train_step import DIM, MAKERS, MEASURABLE_BYTES, OPTIMIZERS, VOCABULARIES
from tpuembed import FTRL, SGD, Adagrad, AdagradMomentum, Adam, FeatureConfig, TableConfig, TPUEmbedding, Vocabulary
from tpuembed.config import COMBINERS

DEVICES = ("GPU", "CPU")
BATCHES = (4096, 65536)
WARM_UP_STEPS = 4
ROUNDS, BLOCK_SECONDS = 5, 0.1
TOLERANCE = 1e-5  # of the largest number in a table or slot: a GPU adds the gradients of a row in any order
ROWS, EXAMPLES, STEPS = 50, 16, 5
RULES: Mapping[str, Any] = {
    "sgd": SGD(0.1),
    "adagrad": Adagrad(0.1),
    "adagrad_momentum": AdagradMomentum(0.1, momentum=0.7, use_nesterov=True),
    "adam": Adam(0.05),
    "adam, every row": Adam(0.05, lazy_adam=False),
    "ftrl": FTRL(0.1, l1_regularization_strength=0.01),
}


def checks() -> dict[str, Any]:
    """Return what was found: the largest difference of each optimizer's numbers, in parts of the largest number, and more.

    Raises:
        AssertionError: the devices differ by more than TOLERANCE, or a check failed.
    """
    differences = {rule: _train_on_both(rule) for rule in RULES}
    assert max(differences.values()) <= TOLERANCE, differences
    _restore_on_the_other()
    _look_names_up()
    return {
        "tolerance": TOLERANCE,
        "largest difference": differences,
        "checkpoints restored on the other device": "equal bit for bit",
        "rows of names": "equal",
        "an id outside": _train_ids_outside(),
        "operations that are on the CPU alone": _operations_on_cpu(),
    }


def _layer(rule: str) -> TPUEmbedding:
    features = {}
    for combiner in COMBINERS:
        table = TableConfig(ROWS, 4, combiner, combiner=combiner)
        features |= {f"{kind}_{combiner}": FeatureConfig(table) for kind in ("dense", "sparse", "ragged", "weighted")}
        features[f"sequence_{combiner}"] = FeatureConfig(table, max_sequence_length=3)
    return TPUEmbedding(features, RULES[rule], track_rows=rule != "adam, every row", name="embedding")


def _batch(random: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ids and weights for a layer of `_layer`."""

    def ragged() -> Any:
        lengths = random.integers(0, 5, EXAMPLES)
        return tf.RaggedTensor.from_row_lengths(random.integers(0, ROWS, lengths.sum()), lengths)

    ids: dict[str, Any] = {}
    weights = {}
    for combiner in COMBINERS:
        ids[f"dense_{combiner}"] = tf.constant(random.integers(0, ROWS, EXAMPLES))
        ids[f"ragged_{combiner}"], ids[f"weighted_{combiner}"] = ragged(), ragged()
        ids[f"sparse_{combiner}"], ids[f"sequence_{combiner}"] = ragged().to_sparse(), ragged().to_sparse()
        of = ids[f"weighted_{combiner}"]
        weights[f"weighted_{combiner}"] = of.with_values(
            tf.constant(random.uniform(0.1, 2, of.values.shape), "float32")
        )
    return ids, {name: weights.get(name) for name in ids}


def _trained(device: str, rule: str, seed: int) -> TPUEmbedding:
    """Return a layer after STEPS steps in a `tf.function` on `device`."""
    random = np.random.default_rng(seed)
    with tf.device(f"{device}:0"):
        layer = _layer(rule)
        for variable in layer.embedding_tables.values():
            variable.assign(random.normal(size=variable.shape))

        @tf.function(reduce_retracing=True)
        def step(ids: Any, weights: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(tf.sin(rows)) for rows in tf.nest.flatten(layer(ids, weights))])
            layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))

        for _ in range(STEPS):
            step(*_batch(random))
    for name, variable in layer.named_variables().items():
        assert f"device:{device}" in variable.device or variable.dtype == tf.int32, (name, variable.device)
    return layer


def _train_on_both(rule: str) -> float:
    gpu, cpu = (_trained(device, rule, seed=1).named_variables() for device in DEVICES)
    differences = [0.0]
    for name, there in cpu.items():
        here, there = gpu[name].numpy(), there.numpy()
        if here.dtype == np.int32:
            np.testing.assert_array_equal(here, there, err_msg=name)
        else:
            differences.append(float(np.abs(here - there).max() / np.abs(there).max()))
    assert np.isfinite(differences).all(), differences
    return max(differences)


def _restore_on_the_other() -> None:
    for written, read in (DEVICES, DEVICES[::-1]):
        saved = _trained(written, "adam", seed=2)
        expected = {name: variable.numpy() for name, variable in saved.named_variables().items()}
        with tempfile.TemporaryDirectory() as folder, tf.device(f"{read}:0"):
            path = tf.train.Checkpoint(layer=saved).write(f"{folder}/checkpoint")
            restored = _layer("adam")
            tf.train.Checkpoint(layer=restored).read(path).assert_consumed()
        for name, variable in restored.named_variables().items():
            np.testing.assert_array_equal(variable.numpy(), expected[name], err_msg=name)
        assert int(restored.updates.numpy()) == STEPS


def _look_names_up() -> None:
    names = [f"name {number}".encode() for number in range(ROWS)]
    with tf.device("GPU:0"):
        feature = FeatureConfig(TableConfig(ROWS, 4, "names", combiner="sum"), vocabulary=Vocabulary(names))
        layer = TPUEmbedding({"x": feature}, "adagrad")
        picked = np.random.default_rng(3).integers(0, ROWS, 100)
        found = tf.function(layer)({"x": tf.constant([names[number] for number in picked])})["x"]
    (table,) = layer.embedding_tables.values()
    np.testing.assert_array_equal(found.numpy(), table.numpy()[picked])


def _train_ids_outside() -> str:
    """Train a batch with ids outside the table: their rows are NaN, and the table and its slots keep every other row."""
    for rule, ids in itertools.product(("adagrad", "adam, every row"), ([3, ROWS], [3, -7], [3, 2**40])):
        with tf.device("GPU:0"):
            layer = TPUEmbedding(FeatureConfig(TableConfig(ROWS, 4, "t")), optimizer=RULES[rule])
            (table,) = layer.embedding_tables.values()
            before = table.numpy()

            @tf.function
            def step(ids: Any, layer: Any = layer) -> Any:
                with tf.GradientTape() as tape:
                    rows = layer(ids)
                    loss = tf.reduce_sum(rows[0])
                layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
                return rows

            rows = step(tf.constant(ids, tf.int64)).numpy()
        np.testing.assert_array_equal(rows[0], before[3])
        assert np.isnan(rows[1]).all(), (rule, ids, rows)
        changed = np.flatnonzero((table.numpy() != before).any(1))
        np.testing.assert_array_equal(changed, [3], err_msg=f"{rule}, {ids}")
    return "its row is NaN, and it trains nothing"


def _operations_on_cpu() -> list[str]:
    """Return the types of operations of a training step that TensorFlow places on the CPU alone."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--placements"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0"},
    )
    found = re.findall(r"\S+: \((\w+)\): \S*device:(\w+):0", done.stderr)
    assert any(device == "GPU" for _, device in found), done.stderr[-2000:]
    on = {device: {operation for operation, at in found if at == device} for device in DEVICES}
    return sorted(on["CPU"] - on["GPU"])


# ---- the time and memory of a step


def steps() -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each optimizer, vocabulary and batch, with the milliseconds and the peak memory of each contender."""
    for optimizer, vocabulary, batch in itertools.product(OPTIMIZERS, VOCABULARIES, BATCHES):
        yield f"{optimizer}, vocabulary {vocabulary}, batch {batch}", _compare(optimizer, vocabulary, batch)


def _compare(optimizer: str, vocabulary: int, batch: int) -> dict[str, float]:
    gc.collect()  # what the last case holds would be freed while this one's memory is measured
    found: dict[str, float] = {}
    contenders: dict[str, Callable[[], None]] = {}
    for device, name in itertools.product(DEVICES, ("tpuembed", "keras")):
        contender = f"{name} {device}"
        before = _gpu_memory("current")
        tf.config.experimental.reset_memory_stats("GPU:0")
        with tf.device(f"{device}:0"):
            contenders[contender] = _on(device, MAKERS[name](optimizer, vocabulary, batch))
        for _ in range(WARM_UP_STEPS):
            contenders[contender]()
        tf.test.experimental.sync_devices()
        if device == "GPU" and 4 * DIM * vocabulary >= MEASURABLE_BYTES:
            found[f"{contender}_peak_tables"] = (_gpu_memory("peak") - before) / (4 * DIM * vocabulary)
    times: dict[str, list[float]] = {contender: [] for contender in contenders}
    for _, (contender, step) in itertools.product(range(ROUNDS), contenders.items()):
        times[contender].append(_block(step))
    for contender, taken in times.items():
        found[f"{contender}_ms"] = statistics.median(taken) * 1e3
    for device in DEVICES:
        found[f"keras / tpuembed, {device}"] = found[f"keras {device}_ms"] / found[f"tpuembed {device}_ms"]
    found["CPU / GPU, tpuembed"] = found["tpuembed CPU_ms"] / found["tpuembed GPU_ms"]
    return found


def _on(device: str, step: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        with tf.device(f"{device}:0"):
            step()

    return run


def _block(step: Callable[[], None]) -> float:
    """Return the seconds of a step, of as many as BLOCK_SECONDS take."""
    count, started = 0, time.perf_counter()
    while time.perf_counter() < started + BLOCK_SECONDS:
        step()
        count += 1
    tf.test.experimental.sync_devices()  # the loss is there before the rows are updated
    return (time.perf_counter() - started) / count


def _gpu_memory(which: str) -> int:
    return int(tf.config.experimental.get_memory_info("GPU:0")[which])


def _environment() -> dict[str, Any]:
    details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
    return {
        "GPU": details.get("device_name"),
        "compute capability": ".".join(map(str, details.get("compute_capability", ()))),
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", action="store_true", help="no steps are timed")
    parser.add_argument("--steps", action="store_true", help="nothing is checked")
    parser.add_argument("--placements", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not tf.config.list_physical_devices("GPU"):
        sys.exit("benchmarks.gpu: TensorFlow finds no GPU here.")
    if options.placements:
        tf.debugging.set_log_device_placement(True)
        _trained("GPU", "adam", seed=0)
        return
    report = _environment()
    if not options.steps:
        report["checks"] = checks()
    if not options.checks:
        for case, found in steps():
            print(case, {key: round(value, 3) for key, value in found.items()}, file=sys.stderr, flush=True)
            report[case] = found
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
