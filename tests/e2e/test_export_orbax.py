"""From a checkpoint that JAX trained on SparseCores to a SavedModel that answers: stacked tables, put in order by workers."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support import capi
from tests.support.checkpoint.orbax_trees import write_tree
from tpuembed import export_saved_model
from tpuembed.checkpoint.orbax import chunk_memory
from tpuembed.export.plan import planner

GOLDEN = Path(__file__).parents[1] / "golden" / "orbax" / "keras_rs_stacked"


@pytest.mark.nightly
def test_rows_of_stacked_tables(tmp_path: Path) -> None:
    truth = json.loads((GOLDEN / "truth.json").read_text())
    tables = {name: np.load(GOLDEN / files["rows"]) for name, files in truth["tables"].items()}
    report = export_saved_model(
        GOLDEN / truth["checkpoint"],
        tmp_path / "model",
        serving_config={"features": {name: {"table": name, "input": "id"} for name in tables}},
        checkpoint_options={"embedding_spec": str(GOLDEN / "spec.pbtxt")},
        workers=2,
    )
    for last in (0, 1, 36):
        ids = {name: np.array([last % len(rows), len(rows) - 1, 0]) for name, rows in tables.items()}
        found = capi.predict(report.path, ids)
        for name, rows in tables.items():
            np.testing.assert_array_equal(found[name], rows[ids[name]])


@pytest.mark.nightly
def test_a_slow_way_to_read_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers read a stack in pieces; what would decode each chunk once is said, and is true."""
    rows, dim, cores = 4096, 8, 4
    table = np.random.default_rng(0).random((rows, dim), np.float32)
    stack = table.reshape(-1, cores, dim).swapaxes(0, 1).reshape(rows, dim)
    path = write_tree(tmp_path / "ckpt", {("var:t:table",): stack}, chunks=(rows // cores, dim))
    spec = {"t": {"num_sparsecores": cores, "tables": {"t": {"vocab_size": rows, "embedding_dim": dim}}}}
    chunk = rows // cores * dim * 4

    def export(name: str, piece_bytes: int, **options: int) -> Path:
        monkeypatch.setattr(planner, "_CHUNK_BYTES", piece_bytes)
        report = export_saved_model(
            path,
            tmp_path / name,
            serving_config={"features": {"t": {"table": "t", "input": "id"}}},
            checkpoint_options={"embedding_spec": spec, **options},
            workers=1,
        )
        return report.path

    export("small", 4096)  # its chunks fit
    monkeypatch.setattr(chunk_memory, "_SPARE_BYTES", 4 * chunk)
    export("one_piece", 1 << 20)
    need = 4 * (chunk + chunk // 64 + 1024) + 2 * chunk + chunk // 64 + 4096
    with pytest.warns(UserWarning, match=f"is in 4 chunks of {chunk} bytes.*chunk_memory_bytes={need}") as caught:
        found = export("slow", 4096)
    assert [warning.filename for warning in caught] == [__file__]
    np.testing.assert_array_equal(capi.predict(found, {"t": np.arange(rows)})["t"], table)
    export("fast", 4096, chunk_memory_bytes=need)
