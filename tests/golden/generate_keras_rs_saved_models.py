"""Writes the files under tests/golden/keras_rs_saved_models with the real classes; see README.md beside it for how to run it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf

from tests.golden.generate_keras_rs import ADAM, BATCH, Misleading, functional, randomise, trained

ROOT = Path(__file__).parent / "keras_rs_saved_models"


def write(name: str, model: Any, save: Callable[[Any, str], Any]) -> Path:
    folder = ROOT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save(model, str(folder / "model"))
    return folder


def truth(folder: Path, model: Any, slots_are_saved: bool = False) -> None:
    """The tables by the layer's own accounts, and the optimizer's slots by its variables' paths."""
    kept = {variable.path: variable for variable in model.optimizer.variables} if slots_are_saved else {}
    tables: dict[str, Any] = {}
    for number, (name, rows) in enumerate(sorted(model.get_layer("de").get_embedding_tables().items())):
        arrays = {"": rows}
        for theirs, ours in ADAM.items() if kept else ():
            arrays[ours] = kept[f"{model.optimizer.name}/de_{name}_embeddings_{theirs}"]
        stems = {role: f"table{number}" + (f"-{role}" if role else "") for role in arrays}
        for role, array in arrays.items():
            np.save(folder / f"{stems[role]}.npy", np.asarray(array))
        slots = {role: f"{stem}.npy" for role, stem in stems.items() if role}
        tables[name] = {"rows": f"{stems['']}.npy", "slots": slots}
    (folder / "truth.json").write_text(json.dumps({"tables": tables}, indent=1, sort_keys=True) + "\n")


def misleading() -> Any:
    model = Misleading()
    model.compile("adagrad", "mse")
    model.fit(np.ones((BATCH, 3), np.int32), np.zeros((BATCH, 1)), batch_size=BATCH, verbose=0)
    randomise(model)
    return model


def main() -> None:
    model = trained(functional(), keras.optimizers.Adam(0.1))
    truth(write("exported", model, lambda it, path: it.export(path, verbose=False)), model)
    truth(write("saved", model, tf.saved_model.save), model, slots_are_saved=True)
    untrained = functional()
    rng = np.random.default_rng(9)
    for variable in untrained.weights:
        variable.assign(rng.normal(size=variable.shape))
    truth(write("untrained", untrained, tf.saved_model.save), untrained)
    write("misleading", misleading(), tf.saved_model.save)


if __name__ == "__main__":
    main()
