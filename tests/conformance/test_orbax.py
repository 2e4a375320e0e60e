"""Checkpoints of JAX: trees in chunks of every form."""

from pathlib import Path

import pytest

from tests.support.checkpoint.conformance import Case, CheckpointConformance, Truth, random_table
from tests.support.checkpoint.orbax_trees import Leaves, write_tree


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
