"""Runs of stored rows, by numbers worked out by hand."""

from tpuembed.checkpoint.bundle.sparsecore_layouts import TableLayout
from tpuembed.checkpoint.orbax.row_runs import Run, contiguous_run, mod_sharded_runs, split_run

LAYOUT = TableLayout(
    table="t",
    stack="s",
    num_sparse_cores=4,
    num_partitions=1,
    shard_rows=10,
    shape=(9, 2),
    padded_shape=(12, 8),
    offset=3,
    rotation=1,
)
"""Row 0 is in core 1, at 10 + 3; row 3 in core 0, at 0 + 3; row 4 in core 1 again, one row on."""


def test_contiguous_rows_are_one_run() -> None:
    assert list(contiguous_run(3, 8)) == [Run(3, 5, 0, 1)]
    assert list(contiguous_run(3, 3)) == []


def test_interleaved() -> None:
    assert list(mod_sharded_runs(LAYOUT, 0, 9)) == [
        Run(13, 3, 0, 4),
        Run(23, 2, 1, 4),
        Run(33, 2, 2, 4),
        Run(3, 2, 3, 4),
    ]
    assert list(mod_sharded_runs(LAYOUT, 6, 9)) == [Run(34, 1, 0, 4), Run(4, 1, 1, 4), Run(15, 1, 2, 4)]
    assert list(mod_sharded_runs(LAYOUT, 5, 5)) == []


def test_a_run_is_split_at_the_chunks() -> None:
    assert list(split_run(Run(13, 9, 2, 4), 5)) == [Run(13, 2, 2, 4), Run(15, 5, 10, 4), Run(20, 2, 30, 4)]
    assert list(split_run(Run(5, 5, 0, 1), 5)) == [Run(5, 5, 0, 1)]
