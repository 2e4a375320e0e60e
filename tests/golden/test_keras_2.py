"""Slots of Keras 2's optimizers, by its own account: each where it is proven, and no table."""

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
        found = {table: set(info.slots) for table, info in checkpoint.tables().items()}
        assert found == {table: set(values["slots"]) for table, values in truth.items()}
        for table, values in truth.items():
            np.testing.assert_array_equal(checkpoint.read(table), np.float32(values["rows"]))
            for slot, kept in values["slots"].items():
                np.testing.assert_array_equal(checkpoint.read(table, slot=slot), np.float32(kept))
