"""Rows of an overlay replace those of its base, beside numpy. The base's rows that are gathered stay as they are."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tpuembed.export.graph.overlay import gather_overlaid
from tpuembed.export.overlay.changes import write_words
from tpuembed.export.plan.plan import ArrayPlan

NAMES = ("stack", "stack_rows", "stack_words")


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64, 1_000])
@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
@pytest.mark.sampled(6)
def test_any_ids_beside_numpy(tmp_path: Path, rows: int, share: float) -> None:
    random = np.random.default_rng(rows)
    changed = np.sort(random.choice(rows, max(int(rows * share), 1), replace=False))
    base, own = (random.standard_normal((count, 3)).astype(np.float32) for count in (rows, len(changed)))
    write_words(changed, rows, tmp_path / "words")
    arrays: tuple[Any, ...] = (base, own, np.fromfile(tmp_path / "words", np.int64))
    variables = {name: tf.Variable(array) for name, array in zip(NAMES, arrays, strict=True)}
    tables = [SimpleNamespace(table="t", row_offset=0, rows=rows)]
    stack: Any = SimpleNamespace(
        name="stack",
        rows=rows,
        tables=tables,
        arrays=[ArrayPlan(name=name, dtype="", shape=array.shape) for name, array in zip(NAMES, arrays, strict=True)],
        overlay=SimpleNamespace(base_rows=rows, base_tables={"t": (0, rows)}),
    )

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def looked_up(ids: Any) -> Any:
        of_base = tf.gather(variables["stack"], ids)
        found = [gather_overlaid(stack, variables, ids) for _ in range(2)]
        return *found, of_base, tf.gather(variables["stack"], ids)

    now = base.copy()
    now[changed] = own
    kept = np.setdiff1d(np.arange(rows), changed)
    for ids in (np.arange(rows), random.integers(0, rows, 99), changed, kept, changed[:0]):
        first, second, before, after = looked_up(ids.astype(np.int64))
        for found, wanted in ((first, now), (second, now), (before, base), (after, base)):
            np.testing.assert_array_equal(found, wanted[ids])
