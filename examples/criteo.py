"""A click model on Criteo's log, from the lines of a file to served predictions: DLRM, DCN v2, or Wide & Deep.

python examples/criteo.py --model dlrm                              # on a generated log: about a minute
python examples/criteo.py --model dcn --data train.txt --scale 1    # on the log of Criteo's challenge at Kaggle
"""

import argparse
import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from tpuembed import FTRL, Adagrad, FeatureConfig, TableConfig, TPUEmbedding, export_saved_model

NUMBERS, DIM, BATCH = 13, 16, 512
# How many different strings each column of the Kaggle log has, as facebookresearch/dlrm counted them.
STRINGS = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194]
STRINGS += [27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]
COLUMNS = [f"c{number}" for number in range(1, len(STRINGS) + 1)]


# ---- the log


def generate(file: Path, lines: int, scale: float) -> Any:
    """Write a log in Criteo's format. Returns the click probability of each line, which no model can beat."""
    random = np.random.default_rng(1)
    columns, logit, left, right = [], np.zeros(lines), np.zeros((lines, 4)), np.zeros((lines, 4))
    for _ in range(NUMBERS):
        counts, known = random.lognormal(1, 1.5, lines).astype(int), random.random(lines) > 0.2
        logit += known * random.normal(0, 0.2) * (np.log1p(counts) - 1)
        columns.append(np.where(known, counts.astype(str), ""))
    for index, strings in enumerate(STRINGS):
        strings = min(strings, table_rows(strings, scale))
        names = np.array([f"{number:08x}" for number in random.integers(0, 2**32, strings)])
        ids, known = (strings * random.random(lines) ** 8).astype(int), random.random(lines) > 0.05  # most are rare
        logit += known * random.normal(0, 0.3, strings)[ids]
        side = left if index % 2 else right  # some strings of odd columns go well with some of even ones
        side += known[:, None] * random.normal(0, 0.15, (strings, 4))[ids]
        columns.append(np.where(known, names[ids], ""))
    logit += (left * right).sum(1)
    probabilities = 1 / (1 + np.exp(1.3 + logit.mean() - logit))  # about a quarter are clicks, as in the challenge
    clicks = (random.random(lines) < probabilities).astype(int).astype(str)
    file.write_text("".join("\t".join(line) + "\n" for line in zip(clicks, *columns, strict=True)))
    return probabilities


def count_lines(file: Path) -> int:
    """Return how many lines a log has. Ends the program, with the line's number, if one has not the fields of the format."""
    fields, lines = 1 + NUMBERS + len(COLUMNS), 0
    with file.open("rb") as opened:
        for lines, line in enumerate(opened, 1):
            if (found := line.count(b"\t") + 1) != fields:
                sys.exit(f"{file}, line {lines}: {found} fields, separated by tabs. Criteo's format has {fields}.")
    if lines < 100:
        sys.exit(f"{file} has {lines} lines. Give at least 100, of which the last 10 are those to test on.")
    return lines


def read(file: Path, start: int, stop: int) -> Any:
    """Read some lines of a log, in batches. It is in the order of time, so that the last lines are those to test on."""

    def parse(lines: Any) -> Any:
        defaults = [[0.0]] * (1 + NUMBERS) + [[""]] * len(COLUMNS)  # a missing number is 0, a missing string ""
        label, *fields = tf.io.decode_csv(lines, defaults, field_delim="\t", use_quote_delim=False)
        strings = dict(zip(COLUMNS, fields[NUMBERS:], strict=True))
        return {"numbers": tf.stack(fields[:NUMBERS], 1), **strings}, label[:, None]

    batches = tf.data.TextLineDataset(str(file)).skip(start).take(stop - start).batch(BATCH)
    batches = batches.apply(tf.data.experimental.assert_cardinality(-((start - stop) // BATCH)))  # for Keras
    return batches.map(parse, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


# ---- the models


def table_rows(strings: int, scale: float) -> int:
    """Return the size of the table of a column: small ones stay large enough for hashes that rarely collide."""
    return max(1000, round(scale * strings))


def build(model: str = "dlrm", scale: float = 0.01, dtype: str = "float32") -> Any:
    """Build a model that takes the fields of a line. Training, the export and so the server hash their strings alike."""
    keras.config.set_dtype_policy(dtype)
    inputs = {"numbers": keras.Input((NUMBERS,), name="numbers")}
    inputs |= {name: keras.Input((), dtype="string", name=name) for name in COLUMNS}
    rows = {name: table_rows(strings, scale) for name, strings in zip(COLUMNS, STRINGS, strict=True)}
    ids = {name: layers.Hashing(rows[name], mask_value="", name=f"hash_{name}")(inputs[name]) for name in COLUMNS}
    numbers = ops.log1p(ops.relu(inputs["numbers"]))
    logit = MODELS[model](numbers, ids, rows)
    return keras.Model(inputs, layers.Activation("sigmoid", dtype="float32", name="click")(logit))


def embed(ids: Any, rows: dict[str, int]) -> list[Any]:
    """Look up a row of each column's table."""
    features = {name: FeatureConfig(TableConfig(rows[name], DIM, name, initializer="uniform")) for name in ids}
    return list(TPUEmbedding(features, optimizer=Adagrad(learning_rate=0.05), name="embedding")(ids).values())


def mlp(name: str, inputs: Any, *widths: int) -> Any:
    for number, width in enumerate(widths):
        inputs = layers.Dense(width, "relu", name=f"{name}_{number}")(inputs)
    return inputs


def dlrm(numbers: Any, ids: Any, rows: dict[str, int]) -> Any:
    """Naumov et al., 2019: products of all pairs of vectors."""
    bottom = mlp("bottom", numbers, 64, DIM)
    vectors = ops.stack([bottom, *embed(ids, rows)], 1)  # [batch, 27, DIM]
    count = vectors.shape[1]
    products = ops.reshape(ops.matmul(vectors, ops.swapaxes(vectors, 1, 2)), (-1, count * count))
    pairs = ops.take(products, [first * count + second for first in range(count) for second in range(first)], 1)
    return layers.Dense(1, name="logit")(mlp("top", ops.concatenate([bottom, pairs], 1), 128, 64))


def dcn(numbers: Any, ids: Any, rows: dict[str, int]) -> Any:
    """Wang et al., 2021: x' = x0 * (W x + b) + x, then a deep part."""
    first = crossed = ops.concatenate([numbers, *embed(ids, rows)], 1)
    for number in range(2):
        crossed = first * layers.Dense(first.shape[1], name=f"cross_{number}")(crossed) + crossed
    return layers.Dense(1, name="logit")(mlp("deep", crossed, 128, 64))


def wide_deep(numbers: Any, ids: Any, rows: dict[str, int]) -> Any:
    """Cheng et al., 2016: a linear model, whose weights are tables of one column that FTRL trains, beside a deep model."""
    config = {f"wide_{name}": TableConfig(rows[name], 1, f"wide_{name}", initializer="zeros") for name in ids}
    wide = TPUEmbedding({name: FeatureConfig(table) for name, table in config.items()}, optimizer=FTRL(), name="wide")
    linear = wide({f"wide_{name}": column for name, column in ids.items()})
    deep = mlp("deep", ops.concatenate([numbers, *embed(ids, rows)], 1), 128, 64)
    return layers.Dense(1, name="logit")(deep) + sum(linear.values())


MODELS = {"dlrm": dlrm, "dcn": dcn, "wide_deep": wide_deep}


# ---- train, export, serve


def train(model: Any, data: Any, validation: Any, epochs: int, out: Path) -> Any:
    """Fit the model. Returns that of the best epoch, from its file."""
    model.compile("adam", "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    callbacks = [
        keras.callbacks.EarlyStopping("val_auc", mode="max"),
        keras.callbacks.ModelCheckpoint(out / "best.keras", "val_auc", mode="max", save_best_only=True),
    ]
    if importlib.util.find_spec("tensorboard"):  # TensorFlow 2.21 does not install it
        callbacks.append(keras.callbacks.TensorBoard(out / "tensorboard"))
    model.fit(data, validation_data=validation, epochs=epochs, verbose=2, shuffle=False, callbacks=callbacks)
    return keras.models.load_model(out / "best.keras")


@contextlib.contextmanager
def serving(model_dir: Path) -> Iterator[str]:
    """Run `tpuembed serve` until it is ready. Gives the URL of the model."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    command = ["serve", str(model_dir), "--no-grpc", "--rest-port", str(port), "--quiet"]
    with subprocess.Popen([sys.executable, "-m", "tpuembed_cli.main", *command]) as server:
        try:
            while server.poll() is None:
                with contextlib.suppress(OSError):  # it does not listen yet, or loads the model
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz").close()
                    break
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1/models/{model_dir.name}"
        finally:
            server.terminate()


def ask(url: str, inputs: dict[str, Any]) -> Any:
    """Return the served predictions for a batch."""
    columns = {name: values.numpy().astype(str if name in COLUMNS else float) for name, values in inputs.items()}
    body = json.dumps({"inputs": {name: values.tolist() for name, values in columns.items()}}).encode()
    with urllib.request.urlopen(f"{url}:predict", body) as answer:
        return np.array(json.load(answer)["outputs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="dlrm")
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="a log in Criteo's format; without it, one is generated"
    )
    parser.add_argument("--lines", type=int, default=200_000, help="how many lines to generate")
    parser.add_argument("--scale", type=float, default=0.01, help="rows in a table, for each string of its column")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "mixed_bfloat16"], default="float32")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("criteo"))
    options = parser.parse_args()

    keras.utils.set_random_seed(1)
    options.out.mkdir(parents=True, exist_ok=True)
    file, lines = options.data or options.out / "log.tsv", options.lines
    if options.data is None:
        probabilities = generate(file, lines, options.scale)
    else:
        lines = count_lines(file)
    first, second = lines * 8 // 10, lines * 9 // 10

    def factory() -> Any:
        return build(options.model, options.scale, options.dtype)

    model = train(factory(), read(file, 0, first), read(file, first, second), options.epochs, options.out)
    test = read(file, second, lines)
    print(f"test AUC: {model.evaluate(test, verbose=0, return_dict=True)['auc']:.4f}; of chance 0.5")
    if options.data is None:
        best = keras.metrics.AUC()
        for (_, labels), start in zip(test, range(second, lines, BATCH), strict=True):
            best.update_state(labels[:, 0], probabilities[start : start + BATCH])
        print(f"the best possible, that of the generator's probabilities: {best.result():.4f}")

    report = export_saved_model(options.out / "best.keras", options.out / options.model, model=factory)
    print(f"export: {report.path}, {report.bytes_written / 1e6:.1f} MB of tables in {report.seconds:.1f} s")
    with serving(options.out / options.model) as url:
        inputs, _ = next(iter(test))
        difference = np.abs(ask(url, inputs) - model.predict(inputs, verbose=0)).max()
    print(f"{len(inputs['numbers'])} served predictions differ from model.predict by {difference:.1e} at most")


if __name__ == "__main__":
    main()
