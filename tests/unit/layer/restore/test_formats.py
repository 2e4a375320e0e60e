"""Every golden of every format, restored into a live layer: what its own writer said it holds."""

import pytest

from tests.support.goldens import FOLDER, read_golden
from tests.support.layer.restored import TRAINED_BY, Tables, assert_held, layer_for, updates

GOLDENS = sorted(
    f"{folder.parent.name}/{folder.name}"
    for group in ("keras_rs", "orbax", "tensorflow", "tfrs", "tpu")
    for folder in (FOLDER / group).iterdir()
)

STEPS = {"tfrs/keras_a": 1, "tfrs/keras_f": 1, "keras_rs/checkpoint_": 1, "keras_rs/keras_": 1, "tfrs/schedule_": 5}
"""By the beginning of a golden's name: the steps that a Keras optimizer in it counted."""


@pytest.mark.parametrize("name", GOLDENS)
def test_a_golden_is_restored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpuembed.backends.table_rows.PIECE_BYTES", 100)  # some rows at a time
    golden = read_golden(name)
    slots = all(frozenset(slot for slot in table if slot) in TRAINED_BY for table in golden.tables.values())
    truth: Tables = golden.tables
    if not slots:
        truth = {table: {None: rows[None]} for table, rows in golden.tables.items()}
    layer = layer_for(truth)
    report = layer.restore_tables(golden.path, slots=slots, **golden.options)
    assert_held(layer, truth)
    assert [plan.table for plan in report.tables] == list(truth)
    counted = (steps for start, steps in STEPS.items() if name.startswith(start))
    steps = 0 if name == "tensorflow/own_layer" else next(counted, None) if slots else None
    assert report.updates == steps
    assert updates(layer) == (steps or 0)


def test_the_list_of_goldens_has_every_order_of_slots() -> None:
    """Else the test above would restore rows alone."""
    seen = {frozenset(s for s in table if s) for name in GOLDENS for table in read_golden(name).tables.values()}
    assert seen >= set(TRAINED_BY)
