"""Writes the folders under tests/golden/keras_2 with Keras 2's own optimizers; see README.md beside it for how to run it."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
import tf_keras

ROOT = Path(__file__).parent / "keras_2"
K = tf_keras.optimizers


class Golden:
    """A checkpoint and truth.json: its tables and slots as lists of numbers, from the live variables."""

    def __init__(self, name: str) -> None:
        self.folder = ROOT / name
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.tables: dict[str, Any] = {}

    def table(self, name: str, variable: Any, slots: Mapping[str, Any]) -> None:
        kept = {slot: of.numpy().tolist() for slot, of in slots.items()}
        self.tables[name] = {"rows": variable.numpy().tolist(), "slots": kept}

    def finish(self, **roots: Any) -> None:
        tf.train.Checkpoint(**roots).write(str(self.folder / "ckpt"))
        (self.folder / "truth.json").write_text(json.dumps(self.tables, sort_keys=True) + "\n")


def randomise(variables: Any) -> None:
    rng = np.random.default_rng(4)
    for variable in variables:
        if variable.dtype.is_floating and variable.shape.rank:
            variable.assign(rng.normal(size=variable.shape))


def model(name: str, optimizer: Any, lists: Mapping[str, str]) -> None:
    """Two tables and a kernel of one shape, trained; `lists`: a slot -> the optimizer's attribute."""
    golden, inner = Golden(name), getattr(optimizer, "inner_optimizer", optimizer)
    tf_keras.backend.clear_session()
    inputs = [tf_keras.Input((3,), dtype=tf.int32) for _ in range(2)]
    layers = [tf_keras.layers.Embedding(5, 4, name="user"), tf_keras.layers.Embedding(5, 4, name="m")]
    rows = [tf_keras.layers.Flatten()(layer(of)) for layer, of in zip(layers, inputs, strict=True)]
    head = tf_keras.layers.Dense(4, use_bias=False)
    built = tf_keras.Model(inputs, head(tf_keras.layers.Dense(5)(tf_keras.layers.Concatenate()(rows))))
    built.compile(optimizer, "mse")
    built.fit([np.ones((2, 3), np.int32)] * 2, np.zeros((2, 4)), verbose=0)
    randomise([*built.variables, *optimizer.variables])
    for number, variable in enumerate(built.trainable_variables):
        if variable.shape.rank == 2:
            slots = {slot: getattr(inner, attribute)[number] for slot, attribute in lists.items()}
            path = {0: "layer_with_weights-0/embeddings", 1: "layer_with_weights-1/embeddings"}.get(number)
            path = path or {2: "layer_with_weights-2/kernel", 4: "layer_with_weights-3/kernel"}[number]
            golden.table(f"model/{path}", variable, slots)
    golden.finish(model=built)


def variables(name: str, optimizer: Any, names: Mapping[str, tuple[str, int]], lists: Mapping[str, str]) -> None:
    """Plain variables of names that are told, or shared; the first two of one shape."""
    golden, module = Golden(name), tf.Module()
    made = {attribute: tf.Variable(tf.zeros((rows, 2)), name=called) for attribute, (called, rows) in names.items()}
    for attribute, variable in made.items():
        setattr(module, attribute, variable)
    optimizer.apply_gradients([(tf.ones(variable.shape), variable) for variable in made.values()])
    randomise([*made.values(), *optimizer.variables])
    for number, (attribute, variable) in enumerate(made.items()):
        alike = [other for other in names.values() if other == names[attribute]]
        slots = {slot: getattr(optimizer, of)[number] for slot, of in lists.items()} if len(alike) == 1 else {}
        golden.table(f"module/{attribute}", variable, slots)
    golden.finish(module=module, optimizer=optimizer)


def legacy(name: str, optimizer: Any, slots: Mapping[str, str]) -> None:
    """The optimizers before those; `slots`: what it is to be called -> what the optimizer calls it."""
    golden, module = Golden(name), tf.Module()
    module.table = tf.Variable(tf.zeros((5, 2)), name="table")
    optimizer.apply_gradients([(tf.ones((5, 2)), module.table)])
    randomise([module.table, *optimizer.weights])
    golden.table(
        "module/table", module.table, {ours: optimizer.get_slot(module.table, of) for ours, of in slots.items()}
    )
    golden.finish(module=module, optimizer=optimizer)


def main() -> None:
    adam = {"momenta": "_momentums", "velocities": "_velocities"}
    ftrl = {"accumulators": "_accumulators", "linears": "_linears"}
    model("adam", K.Adam(0.1), adam)
    model("adam_amsgrad", K.Adam(0.1, amsgrad=True), adam)
    model("adam_average", K.Adam(0.1, use_ema=True), adam)
    model("adamw", K.AdamW(0.1), adam)
    model("adagrad", K.Adagrad(0.1), {"accumulators": "_accumulators"})
    model("ftrl", K.Ftrl(0.1), ftrl)
    model("momentum", K.SGD(0.1, momentum=0.9), {"momenta": "momentums"})
    model("sgd", K.SGD(0.1), {"momenta": "momentums"})
    for optimizer in (K.RMSprop(0.1, momentum=0.9), K.Lion(0.1), K.Nadam(0.1), K.Adamax(0.1), K.Adadelta(0.1)):
        model(f"unknown_{optimizer.name.lower()}", optimizer, {})
    model("unknown_adafactor", K.Adafactor(0.1), {})
    model("loss_scale", tf_keras.mixed_precision.LossScaleOptimizer(K.Adam(0.1)), adam)
    model("schedule", K.Adam(K.schedules.ExponentialDecay(0.1, 1, 0.5), name="m/v/Adam"), adam)
    variables("names", K.Adam(0.1), {"a": ("m/x", 4), "b": ("x", 4), "c": ("v", 4)}, adam)
    variables("one_name", K.Adam(0.1), {"a": ("Variable", 4), "b": ("Variable", 4), "c": ("Variable", 3)}, adam)
    legacy("legacy_adam", K.legacy.Adam(0.1), {"momenta": "m", "velocities": "v"})
    legacy("legacy_adamax", K.legacy.Adamax(0.1), {"momenta": "m", "v": "v"})
    legacy("legacy_rmsprop", K.legacy.RMSprop(0.1, momentum=0.9), {"rms": "rms", "momentum": "momentum"})
    legacy("legacy_momentum", K.legacy.SGD(0.1, momentum=0.9), {"momenta": "momentum"})


if __name__ == "__main__":
    main()
