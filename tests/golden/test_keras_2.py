"""Slots of Keras 2's legacy optimizers, by its own account. Its newer ones do not say whose slot a variable is: they have none."""

import json
from pathlib import Path

import numpy as np
import pytest

from tpuembed.checkpoint import open_checkpoint

FOLDER = Path(__file__).parent / "keras_2"


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_tables_and_slots(name: str) -> None:
    truth = json.loads((FOLDER / name / "truth.json").read_text())
    with open_checkpoint(FOLDER / name / "ckpt") as checkpoint:
        slots = {table: values["slots"] if name.startswith("legacy") else {} for table, values in truth.items()}
        assert {table: set(info.slots) for table, info in checkpoint.tables().items()} == {
            table: set(kept) for table, kept in slots.items()
        }
        for table, values in truth.items():
            np.testing.assert_array_equal(checkpoint.read(table), np.float32(values["rows"]))
            for slot, kept in slots[table].items():
                np.testing.assert_array_equal(checkpoint.read(table, slot=slot), np.float32(kept))
