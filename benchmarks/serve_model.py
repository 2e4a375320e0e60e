"""The models that servers are measured with: 8 features, each a table of 100,000 x 32, and an MLP 256-64-1.

One is exported by tpuembed; the other, plain, is of Keras' own layers, and Keras saves it.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

FEATURES = 8
ROWS, DIM = 100_000, 32
NAMES = [f"f{number}" for number in range(FEATURES)]


def ranking() -> Any:
    """The Keras model; of `tpuembed export --model`."""
    import keras

    from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

    inputs = {name: keras.Input((), dtype="int64", name=name) for name in NAMES}
    tables = {name: FeatureConfig(TableConfig(ROWS, DIM, f"table_{name}")) for name in NAMES}
    found = TPUEmbedding(tables, optimizer="sgd")(inputs)
    hidden = keras.ops.concatenate([found[name] for name in NAMES], -1)
    for width in (256, 64):
        hidden = keras.layers.Dense(width, activation="relu")(hidden)
    return keras.Model(inputs, {"score": keras.layers.Dense(1, activation="sigmoid")(hidden)})


def plain() -> Any:
    """The same of Keras' own layers."""
    import keras

    inputs = {name: keras.Input((), dtype="int64", name=name) for name in NAMES}
    found = [keras.layers.Embedding(ROWS, DIM)(inputs[name]) for name in NAMES]
    hidden = keras.ops.concatenate(found, -1)
    for width in (256, 64):
        hidden = keras.layers.Dense(width, activation="relu")(hidden)
    return keras.Model(inputs, {"score": keras.layers.Dense(1, activation="sigmoid")(hidden)})


def export(folder: Path) -> tuple[Path, Path]:
    """Export both into `folder`, in a process of its own; the models' folders, the plain one second."""
    code = "import sys; from benchmarks.serve_model import main; main(sys.argv[1])"
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([sys.executable, "-c", code, str(folder)], **quiet)  # type: ignore[call-overload]
    return folder / "rec", folder / "plain"


def main(folder: str) -> None:
    """Train nothing, save, export."""
    import tensorflow as tf

    from tpuembed import export_saved_model

    prefix = tf.train.Checkpoint(model=ranking()).write(f"{folder}/ckpt")
    export_saved_model(prefix, f"{folder}/rec", model=ranking)
    plain().export(f"{folder}/plain/1")
