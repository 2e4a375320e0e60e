"""A training step of a DLRM with 26 tables: this layer, what else trains such tables on a CPU, and the dense part alone.

    python -m benchmarks.real_models [--torch PYTHON] [--rounds N] [--dim N]... [--batch N]... [--uniform] [--output FILE]

The tables have Criteo's cardinalities, at most a million rows each, and Adagrad trains them. Ids are skewed, as in logs, or
`--uniform`. The contenders:

- `dense`: the model without tables. It takes activations, and returns their gradients.
- `tpuembed`; `keras`, 26 `keras.layers.Embedding`; `keras_rs`, its DistributedEmbedding (extra `bench`).
- `torch dense`, `embedding_bag` (`torch.nn.EmbeddingBag(sparse=True)`) and `fbgemm` (its table batched embeddings), the same model
  in torch. PYTHON has an environment of its own: pip install torch, and then fbgemm-gpu-cpu of the same date. (fbgemm-gpu-cpu
  1.8.0 fits torch 2.13.) torchrec brings another fbgemm: install fbgemm-gpu-cpu last.

Each contender first trains the same small model in a process of its own, and their losses are compared. Then those of OTHERS take
steps in turns with ours, each in its process, in a new order each round. A time is the median of all steps, a ratio that of the
rounds' ratios: compare ratios, because the torch and the Keras contenders run one after the other. "tables ms" is the step without
the dense part of the same framework. "peak" is the memory (VmHWM) beyond that of the small model's process, in tables and slots: 1
is nothing else. "fit ms" is a step of `Model.fit` on a dataset, of the first batch size. All takes about 15 minutes.
"""

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
CRITEO = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""The values of each categorical column, in the Kaggle log."""
ROWS = [min(rows, 1_000_000) for rows in CRITEO]
SMALL_ROWS = [min(rows, 100) for rows in CRITEO]
NUMBERS, BOTTOM, TOP = 13, (512, 256, 64), (512, 256, 1)
RATE, ACCUMULATOR, SMALL_VALUE = 0.01, 0.1, 0.01
DIMS, BATCHES = (16, 64), (2048, 8192)
SMALL_STEPS, TOLERANCE = 5, 1e-4
DIFFERENT = 4
"""Batches that a process takes in turn."""
TURN_SECONDS, FIT_STEPS, FIT_EPOCHS = 0.4, 20, 4
DENSE = {"tpuembed": "dense", "keras": "dense", "keras_rs": "dense"}
DENSE |= {"embedding_bag": "torch dense", "fbgemm": "torch dense"}
"""Contender -> the dense part of its framework."""
TORCH = ("torch dense", "embedding_bag", "fbgemm")
_KERAS = ("tensorflow", "keras")
MODULES = {
    "dense": _KERAS,
    "keras": _KERAS,
    "tpuembed": (*_KERAS, "tpuembed"),
    "keras_rs": (*_KERAS, "keras_rs.layers"),
}
MODULES |= {"torch dense": ("torch",), "embedding_bag": ("torch",), "fbgemm": ("torch", "fbgemm_gpu")}
"""What each process imports before it is timed."""
FITS = ("tpuembed", "keras", "keras_rs")
OTHERS = (TORCH, ("keras", "keras_rs"))
"""Who takes turns with `dense` and `tpuembed`: all at once would need 22 GB."""
Step = Callable[[], float]


def run(
    torch: str | None = None,
    rounds: int = 12,
    dims: Sequence[int] = DIMS,
    batches: Sequence[int] = BATCHES,
    uniform: bool = False,
) -> dict[str, Any]:
    """Return figures by dim and batch, and what is missing.

    Args:
        torch: the interpreter of the environment with torch and FBGEMM, or None.
        rounds: how many turns each contender has.
        dims: the widths of the tables.
        batches: the batch sizes.
        uniform: ids are uniform, not skewed.
    """
    pythons = {"dense": sys.executable, **dict.fromkeys(FITS, sys.executable)}
    if torch is not None:
        pythons |= dict.fromkeys(TORCH, torch)
    report: dict[str, Any] = {"rounds": rounds, "ids": "uniform" if uniform else "skewed", "rows": sum(ROWS)}
    for dim in dims:
        report |= _measure(pythons, dim, batches, rounds, uniform)
    return report


def _measure(
    pythons: dict[str, str], dim: int, batches: Sequence[int], rounds: int, uniform: bool
) -> dict[str, dict[str, Any]]:
    small: dict[str, Any] = {}
    for name, python in pythons.items():
        process = _start(python, name, dim, uniform)
        small[name] = _ask(process, ["small", *batches])
        _end(process)
    missing = {name: one["missing"] for name, one in small.items() if "missing" in one}
    present = [name for name in pythons if name not in missing]
    losses = {name: small[name]["loss"] for name in present if name in DENSE}
    assert np.ptp(list(losses.values())) < TOLERANCE, losses
    base = {name: one.get("peak bytes") for name, one in small.items()}
    found: dict[str, dict[str, Any]] = {f"dim {dim}": {"missing": missing} if missing else {}}
    for others in OTHERS:
        names = [name for name in ("dense", "tpuembed", *others) if name in present]
        processes = {name: _start(pythons[name], name, dim, uniform) for name in names}
        try:
            for case, values in _take_turns(processes, base, dim, batches, rounds).items():
                _merge(found.setdefault(case, {}), values)
        finally:
            for process in processes.values():
                _end(process)
    return found


def _take_turns(
    processes: dict[str, Any], base: dict[str, Any], dim: int, batches: Sequence[int], rounds: int
) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(dim)
    once = {name: _ask(process, ["build", batches[0]]) for name, process in processes.items()}
    found: dict[str, dict[str, Any]] = {}
    for batch in batches:
        turns: dict[str, list[list[float]]] = {name: [] for name in processes}
        peaks: dict[str, float] = {}
        for turn in range(rounds + 1):
            for name in rng.permutation(list(processes)).tolist():
                taken = _ask(processes[name], ["steps", batch])
                more = taken["peak bytes"] - base[name][str(batch)]
                peaks[name] = round(more / (2 * 4 * dim * sum(ROWS)), 3)  # a table has one slot
                if turn:  # the first turn warms up
                    turns[name].append(taken["ms"])
        tables = {name: peak for name, peak in peaks.items() if name in DENSE}
        found[f"dim {dim}, batch {batch}"] = {**_summary(turns), "peak": tables}
    for name in FITS:
        if name in processes:
            once[name] |= _ask(processes[name], ["fit", batches[0]])
    keys = ("build s", "first step s", "fit ms")
    found[f"dim {dim}"] = {key: {name: round(one[key], 3) for name, one in once.items() if key in one} for key in keys}
    return found


def _merge(known: dict[str, Any], more: dict[str, Any]) -> None:
    """Add what is not yet known."""
    for key, value in more.items():
        if isinstance(value, dict):
            _merge(known.setdefault(key, {}), value)
        else:
            known.setdefault(key, value)


def _summary(turns: dict[str, list[list[float]]]) -> dict[str, Any]:
    rounds = {name: [statistics.median(turn) for turn in taken] for name, taken in turns.items()}

    def median(of: Callable[[float, float], float], first: str, second: str) -> float:
        return round(statistics.median(map(of, rounds[first], rounds[second])), 3)

    def over(one: float, other: float) -> float:
        return one / other

    def beyond(one: float, other: float) -> float:
        return one - other

    steps = {name: round(statistics.median(itertools.chain(*taken)), 3) for name, taken in turns.items()}
    return {
        "ms": steps,
        "tables ms": {name: median(beyond, name, dense) for name, dense in DENSE.items() if name in turns},
        **{f"{name} / {dense}": median(over, name, dense) for name, dense in DENSE.items() if name in turns},
        **{
            f"{name} / tpuembed": median(over, name, "tpuembed")
            for name in DENSE
            if name in turns and name != "tpuembed"
        },
    }


def _start(python: str, name: str, dim: int, uniform: bool) -> Any:
    return subprocess.Popen(
        [python, "-m", "benchmarks.real_models", "--serve", name, str(dim), str(int(uniform))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE.parent,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
    )


def _end(process: Any) -> None:
    process.stdin.close()
    process.wait(60)


def _ask(process: Any, question: list[Any]) -> dict[str, Any]:
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, f"{process.args} ended"
    answer: dict[str, Any] = json.loads(line)
    return answer


# ---- in the process of a contender


def serve(name: str, dim: int, uniform: bool) -> None:
    """Answer each question of stdin with a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    steps: dict[int, Step] = {}
    make = _torch_model if name in TORCH else _keras_model
    try:
        for module in MODULES[name]:
            importlib.import_module(module)
        missing = None
    except ImportError as error:
        missing = str(error)
    for line in sys.stdin:
        what, *given = json.loads(line)
        answer: dict[str, Any] = {}
        if missing is not None:
            answer = {"missing": missing}
        elif what == "small":
            step, _ = make(name, SMALL_ROWS, dim, SMALL_VALUE)
            answer = {"peak bytes": {}}
            for batch in given:
                take = step(batch, _batches(SMALL_ROWS, batch, uniform))
                answer["loss"] = [take() for _ in range(SMALL_STEPS)][-1]
                answer["peak bytes"][batch] = _peak_bytes()
        elif what == "build":
            started = time.perf_counter()
            step, fit = make(name, ROWS, dim, None)
            built = time.perf_counter()
            steps[given[0]] = step(given[0], _batches(ROWS, given[0], uniform))
            ready = time.perf_counter()
            steps[given[0]]()
            answer = {"build s": built - started, "first step s": time.perf_counter() - ready}
        elif what == "steps":
            if given[0] not in steps:
                steps[given[0]] = step(given[0], _batches(ROWS, given[0], uniform))
            answer = {"ms": _turn(steps[given[0]]), "peak bytes": _peak_bytes()}
        elif what == "fit":
            answer["fit ms"] = fit(_batches(ROWS, given[0], uniform))
        print(json.dumps(answer), file=answers, flush=True)


def _turn(step: Step) -> list[float]:
    """Return the milliseconds of steps, without the first one: another process had the caches."""
    times: list[float] = []
    stop = time.perf_counter() + TURN_SECONDS
    while len(times) < 3 or time.perf_counter() < stop:
        started = time.perf_counter()
        step()
        times.append((time.perf_counter() - started) * 1e3)
    return times[1:]


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def _batches(rows: Sequence[int], batch: int, uniform: bool) -> list[tuple[Any, Any, Any]]:
    """Return [(numbers [batch, 13], ids [26, batch], labels [batch])]. Skewed: an id is as frequent as 1 / (id + 1)."""
    rng = np.random.default_rng(batch)
    found = []
    for _ in range(DIFFERENT):
        parts = rng.random((len(rows), batch))
        sizes = np.array(rows)[:, None]
        ids = parts * sizes if uniform else (sizes + 1.0) ** parts - 1.0
        numbers = rng.random((batch, NUMBERS), np.float32)
        labels = (rng.random(batch) < 0.25).astype(np.float32)
        found.append((numbers, np.minimum(ids.astype(np.int64), sizes - 1), labels))
    return found


def _dense_weights(dim: int) -> Iterator[tuple[Any, Any]]:
    """Yield (kernel [in, out], bias [out]) of every dense layer: the same for every contender."""
    rng = np.random.default_rng(0)
    wide = (len(ROWS) + 1) ** 2 + dim
    for sizes in ((NUMBERS, *BOTTOM, dim), (wide, *TOP)):
        for inputs, outputs in itertools.pairwise(sizes):
            yield (
                rng.normal(0, (2 / inputs) ** 0.5, (inputs, outputs)).astype(np.float32),
                np.zeros(outputs, np.float32),
            )


def _keras_model(name: str, rows: Sequence[int], dim: int, value: float | None) -> tuple[Any, Any]:
    import keras
    import tensorflow as tf

    numbers = keras.Input((NUMBERS,), name="numbers")
    columns = [f"c{index}" for index in range(len(rows))]
    if name == "dense":
        inputs = {column: keras.Input((dim,), name=column) for column in columns}
        activations = list(inputs.values())
    else:
        inputs = {column: keras.Input((), dtype="int64", name=column) for column in columns}
        initializer = None if value is None else keras.initializers.Constant(value)
        activations = _ACTIVATIONS[name](inputs, rows, dim, initializer)
    bottom = numbers
    for size in (*BOTTOM, dim):
        bottom = keras.layers.Dense(size, "relu")(bottom)
    # All products of two, each twice: choosing the half costs more than the layer that reads them.
    stacked = keras.ops.stack([bottom, *activations], 1)
    products = keras.ops.matmul(stacked, keras.ops.transpose(stacked, (0, 2, 1)))
    top = keras.layers.Concatenate()([bottom, keras.layers.Reshape(((len(rows) + 1) ** 2,))(products)])
    for size in TOP[:-1]:
        top = keras.layers.Dense(size, "relu")(top)
    model = keras.Model({"numbers": numbers, **inputs}, keras.layers.Dense(TOP[-1])(top))
    dense = [layer for layer in model.layers if isinstance(layer, keras.layers.Dense)]
    for layer, weights in zip(dense, _dense_weights(dim), strict=True):
        assert layer.kernel.shape == weights[0].shape
        layer.set_weights(weights)
    optimizer = keras.optimizers.Adagrad(RATE, initial_accumulator_value=ACCUMULATOR)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    optimizer.build(model.trainable_variables)

    def examples(batches: Sequence[Any]) -> list[Any]:
        return [
            ({"numbers": one, **dict(zip(columns, ids, strict=True))}, labels[:, None]) for one, ids, labels in batches
        ]

    def step(batch: int, batches: Sequence[Any]) -> Step:
        given = tf.nest.map_structure(tf.constant, examples(batches))
        if name == "dense":
            values = [tf.random.normal((batch, dim), stddev=0.1) for _ in columns]
            given = [({**features, **dict(zip(columns, values, strict=True))}, labels) for features, labels in given]
        turns = itertools.cycle(given)

        @tf.function
        def one(features: Any, labels: Any) -> Any:
            rest = [features[column] for column in columns] if name == "dense" else []
            with tf.GradientTape() as tape:
                tape.watch(rest)
                value = loss(labels, model(features, training=True))
            variables = model.trainable_variables
            gradients = tape.gradient(value, [*variables, *rest])
            optimizer.apply(gradients[: len(variables)], variables)
            return value, gradients[len(variables) :]

        return lambda: float(one(*next(turns))[0].numpy())

    def fit(batches: Sequence[Any]) -> float:
        stacked = tf.nest.map_structure(lambda *parts: np.stack(parts), *examples(batches))
        data = tf.data.Dataset.from_tensor_slices(stacked).repeat(FIT_STEPS // DIFFERENT).prefetch(2)
        ends: list[float] = []
        timer = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: ends.append(time.perf_counter()))
        model.fit(data, epochs=FIT_EPOCHS, verbose=0, shuffle=False, callbacks=[timer])
        return round(statistics.median(np.diff(ends)) / FIT_STEPS * 1e3, 3)  # without the first epoch, which traces

    return step, fit


def _tpuembed(inputs: dict[str, Any], rows: Sequence[int], dim: int, initializer: Any) -> list[Any]:
    from tpuembed import Adagrad, FeatureConfig, TableConfig, TPUEmbedding

    features = {
        column: FeatureConfig(TableConfig(size, dim, column, initializer=initializer))
        for column, size in zip(inputs, rows, strict=True)
    }
    optimizer = Adagrad(RATE, initial_accumulator_value=ACCUMULATOR)
    return list(TPUEmbedding(features, optimizer)(inputs).values())


def _keras(inputs: dict[str, Any], rows: Sequence[int], dim: int, initializer: Any) -> list[Any]:
    import keras

    return [
        keras.layers.Embedding(size, dim, initializer or "uniform")(ids)
        for ids, size in zip(inputs.values(), rows, strict=True)
    ]


def _keras_rs(inputs: dict[str, Any], rows: Sequence[int], dim: int, initializer: Any) -> list[Any]:
    from keras_rs.layers import DistributedEmbedding, FeatureConfig, TableConfig

    options = {"combiner": "sum", "placement": "default_device"}
    features = {}
    for column, size in zip(inputs, rows, strict=True):
        table = TableConfig(column, size, dim, initializer or "uniform", "adagrad", **options)
        features[column] = FeatureConfig(column, table, (None,), (None, dim))
    return list(DistributedEmbedding(features)(inputs).values())


_ACTIVATIONS = {"tpuembed": _tpuembed, "keras": _keras, "keras_rs": _keras_rs}


def _torch_model(name: str, rows: Sequence[int], dim: int, value: float | None) -> tuple[Any, Any]:
    import torch
    from torch import nn

    def layers() -> Iterator[Any]:
        for kernel, bias in _dense_weights(dim):
            layer = nn.Linear(*kernel.shape)
            with torch.no_grad():
                layer.weight.copy_(torch.from_numpy(kernel.T))
                layer.bias.copy_(torch.from_numpy(bias))
            yield layer

    every = list(layers())
    bottom_layers, top_layers = every[: len(BOTTOM) + 1], every[len(BOTTOM) + 1 :]
    options = {"lr": RATE, "initial_accumulator_value": ACCUMULATOR}
    optimizers = [torch.optim.Adagrad([p for layer in every for p in layer.parameters()], fused=True, **options)]
    loss = nn.BCEWithLogitsLoss()
    if name == "embedding_bag":
        bags = [nn.EmbeddingBag(size, dim, mode="sum", sparse=True) for size in rows]
        for bag in bags:
            nn.init.uniform_(bag.weight, -0.05, 0.05) if value is None else nn.init.constant_(bag.weight, value)
        optimizers.append(torch.optim.Adagrad([bag.weight for bag in bags], **options))
    elif name == "fbgemm":
        tables = _fbgemm_tables(rows, dim, value)

    def prepared(ids: Any) -> Any:
        """Return `ids` [26, batch] in the form that the contender takes."""
        if name == "torch dense":
            return [torch.randn(ids.shape[1], dim).mul_(0.1).requires_grad_() for _ in rows]
        if name == "fbgemm":
            return torch.from_numpy(ids.reshape(-1)), torch.arange(ids.size + 1)
        return [torch.from_numpy(each)[:, None] for each in ids]

    def activations(ids: Any) -> Any:
        if name == "fbgemm":
            return tables(*ids).view(-1, len(rows), dim)
        return torch.stack(
            ids if name == "torch dense" else [bag(each) for bag, each in zip(bags, ids, strict=True)], 1
        )

    def train(numbers: Any, ids: Any, labels: Any) -> float:
        for optimizer in optimizers:
            optimizer.zero_grad()
        if name == "torch dense":
            for one in ids:
                one.grad = None
        bottom = numbers
        for layer in bottom_layers:
            bottom = torch.relu(layer(bottom))
        stacked = torch.cat([bottom[:, None], activations(ids)], 1)
        top = torch.cat([bottom, torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)], 1)
        for layer in top_layers[:-1]:
            top = torch.relu(layer(top))
        value = loss(top_layers[-1](top), labels)
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
        return float(value.item())

    def step(batch: int, batches: Sequence[Any]) -> Step:  # noqa: ARG001 - as for Keras
        given = [
            (torch.from_numpy(numbers), prepared(ids), torch.from_numpy(labels)[:, None])
            for numbers, ids, labels in batches
        ]
        turns = itertools.cycle(given)
        return lambda: train(*next(turns))

    return step, None


def _fbgemm_tables(rows: Sequence[int], dim: int, value: float | None) -> Any:
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(size, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for size in rows],
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=RATE,
        eps=1e-10,
        device=torch.device("cpu"),
    )
    tables.init_embedding_weights_uniform(-0.05 if value is None else value, 0.05 if value is None else value)
    for (state,) in tables.split_optimizer_states():
        state.fill_(ACCUMULATOR)
    return tables


def main() -> None:
    """Run what the command line says, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="the interpreter that has torch and FBGEMM")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--dim", type=int, action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--uniform", action="store_true", help="uniform ids, which touch more rows")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "real_models.json")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], int(options.serve[1]), options.serve[2] == "1")
        return
    found = run(options.torch, options.rounds, options.dim or DIMS, options.batch or BATCHES, options.uniform)
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    _print(found)


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    for case, values in found.items():
        if not isinstance(values, dict):
            continue
        table = Table(title=case, title_justify="left")
        columns = [
            name
            for name in ("dense", *DENSE, "torch dense")
            if any(name in v for v in values.values() if isinstance(v, dict))
        ]
        for heading in ("", *columns):
            table.add_column(heading, justify="right")
        for key, value in values.items():
            shown = [value.get(name, "") for name in columns] if isinstance(value, dict) else [value]
            table.add_row(key, *(f"{one:,.4g}" if isinstance(one, float) else str(one) for one in shown))
        Console(width=160).print(table)


if __name__ == "__main__":
    main()
