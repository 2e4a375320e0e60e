"""Checkpoints of JAX: goldens that Orbax, keras-rs and jax-tpu-embedding wrote, and trees in chunks of every form."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.checkpoint.conformance import Case, CheckpointConformance, Truth, random_table
from tests.support.checkpoint.orbax_trees import Leaves, write_tree

GOLDENS = Path(__file__).parents[1] / "golden" / "orbax"


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDENS.iterdir()))
class TestOrbaxGoldens(CheckpointConformance):
    """The truth by the script that wrote them; stacked tables are padded with NaN."""

    @pytest.fixture
    def case(self, name: str) -> Case:
        folder = GOLDENS / name
        truth = json.loads((folder / "truth.json").read_text())

        def load(table: Mapping[str, Any]) -> Truth:
            rows = np.load(folder / table["rows"])
            slots = {slot: np.load(folder / file) for slot, file in table["slots"].items()}
            return Truth(rows.astype(ml_dtypes.bfloat16) if table["dtype"] == "bfloat16" else rows, slots)

        tables = {table: load(files) for table, files in truth["tables"].items()}
        options = {name: str(folder / value) for name, value in truth["options"].items()}
        return Case(folder / truth["checkpoint"], tables, options)


@pytest.mark.parametrize("zarr3", [False, True], ids=["zarr2", "zarr3"])
@pytest.mark.parametrize("ocdbt", [False, True], ids=["files", "ocdbt"])
@pytest.mark.parametrize("chunks", [(4, 3), (64, 16)], ids=str)
class TestOrbaxChunks(CheckpointConformance):
    """Chunks that cut rows and columns, evenly or not, and that reach over the end."""

    @pytest.fixture
    def case(self, chunks: tuple[int, int], ocdbt: bool, zarr3: bool, tmp_path: Path) -> Case:
        tables = {"emb": random_table(23, 9), "half": random_table(8, 2, "float16")}
        leaves: Leaves = {("params", name): rows for name, rows in tables.items()}
        write_tree(tmp_path / "ckpt", leaves, chunks=chunks, ocdbt=ocdbt, zarr3=zarr3)
        return Case(tmp_path / "ckpt", {f"params/{name}": Truth(rows) for name, rows in tables.items()})
