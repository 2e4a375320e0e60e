"""Overlays of tracked layers in a random order of trainings, saves, restores, writes and exports: their rows are the layer's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.export.overlays import overlays_of_any_size
from tests.support.layer.branches import ROWS, make, make_in_sparse_cores, restore, rows_of, step, write_save
from tpuembed import TPUEmbedding, compact_version, export_saved_model
from tpuembed.export.report import ExportReport
from tpuembed.formats.saved_model.stack_rows import StackRows
from tpuembed.manifest import Manifest
from tpuembed.testing import simulated_tpu

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

CONFIG = {"features": {name: {"table": name, "input": "id"} for name in "ab"}}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*stamps of table")
@pytest.mark.filterwarnings("ignore:.*export the same signature")
@pytest.mark.filterwarnings("ignore:.*Writing a full version")
@pytest.mark.parametrize(("seed", "actions"), [(1, 25), (2, 60), (3, 60), (4, 60)])
def test_rows_of_every_version_are_those_of_the_layer(tmp_path: Path, seed: int, actions: int) -> None:
    run_in_random_order(tmp_path, seed, actions, [make() for _ in range(2)])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*stamps of table")
@pytest.mark.filterwarnings("ignore:.*export the same signature")
@pytest.mark.filterwarnings("ignore:.*Writing a full version")
@pytest.mark.parametrize(("seed", "actions"), [(1, 40), (2, 60), (3, 60), (4, 60)])
def test_rows_of_a_layer_in_sparse_cores_and_one_on_the_host(tmp_path: Path, seed: int, actions: int) -> None:
    """They restore each other's checkpoints."""
    with simulated_tpu() as strategy:
        run_in_random_order(tmp_path, seed, actions, [make(), make_in_sparse_cores(strategy)], strategy)


@overlays_of_any_size()
def run_in_random_order(
    tmp_path: Path, seed: int, actions: int, layers: list[TPUEmbedding], strategy: Any = None
) -> None:
    """Act on `layers`, the second of which is in SparseCores if there is a `strategy`."""
    random = np.random.default_rng(seed)
    truth, is_overlay = dict[str, Any](), False
    saves: list[tuple[str, str]] = []
    reports: list[ExportReport] = []
    for _ in range(actions):
        number = int(random.integers(2))
        layer, what = layers[number], random.choice(12)
        if what < 3:
            ids = random.integers(0, ROWS, random.integers(1, 3)).tolist()
            step(layer, ids, strategy if number else None)
        elif what == 3:
            layer.assign_rows("a", int(random.integers(ROWS)), random.random((1, 2), np.float32))
        elif what == 4:
            kinds = ["ckpt", "untracked"] if strategy else ["ckpt", "h5", "untracked"]
            saves.append(write_save(layer, str(random.choice(kinds)), tmp_path))
        elif what == 5 and saves:
            restore(layer, *saves[random.integers(len(saves))])
        elif what == 6 and saves:
            layer.restore_tables(saves[random.integers(len(saves))][1], [["a"], ["b"], None][random.integers(3)])
        elif what == 7 and random.random() < 0.3 and not strategy:
            layer.set_weights(layers[1 - number].get_weights())
        elif what == 8 and is_overlay:
            check(compact_version(tmp_path / "m").path, truth)
            is_overlay = False
        else:
            truth, base = rows_of(layer), ["latest", None, *(report.version for report in reports)]
            options: dict[str, Any] = {"base": base[random.integers(len(base))], "layout": "mmap"}
            if random.random() < 0.5:
                report = export_saved_model(layer, tmp_path / "m", **options)
            else:
                _, path = write_save(layer, "ckpt", tmp_path)
                report = export_saved_model(path, tmp_path / "m", serving_config=CONFIG, **options)
            reports.append(report)
            is_overlay = report.base is not None
            check(report.path, truth)
    if seed == 1:  # the others may not have both
        compared = [report.rows_compared for report in reports if report.base is not None]
        assert 0 in compared, "stamps were never used"
        assert any(compared), "rows were never compared"


def check(version: Path, truth: dict[str, Any]) -> None:
    """The rows of a version of the tables a and b."""
    manifest = Manifest.read(version)
    assert manifest
    (stack,) = manifest.stacks
    rows = StackRows(version, stack).read(0, stack.rows).view(np.float32)
    np.testing.assert_array_equal(rows, np.concatenate([truth["a"], truth["b"]]))
