"""Checkpoints whose index lost a key, its checksums being right: what is left may look whole."""

import contextlib
from pathlib import Path

import pytest

from tests.support.checkpoint.bundle_fuzzer import Patient, compare
from tests.support.goldens import BUNDLES
from tests.support.messages import refused
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import CheckpointCorruptError, CheckpointError

MUSEUM = Path(__file__).parent / "files"


@pytest.mark.parametrize("name", sorted(BUNDLES.keys() - {"partitioned"}))  # TensorFlow 1 does not say what there was
def test_every_key_in_turn(name: str, tmp_path: Path) -> None:
    """Whatever is read without an error is all that was written."""
    patient, refused = Patient(BUNDLES[name], tmp_path), 0
    for key in patient.items:
        for other in (key[:-1], b"x" + key, b"\0" + key[1:]):
            patient.rename(key, other)
            with contextlib.suppress(CheckpointError):
                with open_checkpoint(patient.opened, **patient.truth.options) as checkpoint:
                    assert compare(checkpoint, patient.truth) == "right", key
                continue
            refused += 1
    assert refused > 2 * len(patient.items)


@pytest.mark.parametrize(
    "name",
    [
        "lost_table",
        "lost_object_graph",
    ],
)
def test_checkpoints_with_lost_keys_are_refused(name: str) -> None:
    """What read as the other tables alone, and as variables of TensorFlow 1 in another order, under other names."""
    with refused(CheckpointCorruptError):
        open_checkpoint(MUSEUM / name)
