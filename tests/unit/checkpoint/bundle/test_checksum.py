"""What a checkpoint states about a table's bytes, against TensorFlow's own files."""

from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.bundles import recorded
from tpuembed.checkpoint import open_checkpoint
from tpuembed.checkpoint.types import Array
from tpuembed.errors import UnknownTableError

TABLE = np.arange(120, dtype=np.float32).reshape(30, 4)


def save(folder: Path, options: tf.train.CheckpointOptions | None = None, rows: Array = TABLE) -> str:
    return str(tf.train.Checkpoint(table=tf.Variable(rows)).write(str(folder / "ckpt"), options=options))


def test_a_table_in_one_piece_has_the_checksum_of_its_bytes(tmp_path: Path) -> None:
    with open_checkpoint(save(tmp_path)) as checkpoint:
        assert recorded(checkpoint, "table") == google_crc32c.value(TABLE.tobytes())


@pytest.mark.parametrize("shape", [(30, 4), (2, 60)])
def test_a_table_in_slices_has_one_where_they_are_runs_of_rows(tmp_path: Path, shape: tuple[int, int]) -> None:
    """Rows of 60 numbers are longer than a slice, so that they are cut."""
    sharding = tf.train.experimental.MaxShardSizePolicy(200)
    options = tf.train.CheckpointOptions(experimental_sharding_callback=sharding)
    rows = TABLE.reshape(shape)
    with open_checkpoint(save(tmp_path, options, rows)) as checkpoint:
        assert recorded(checkpoint, "table") == (google_crc32c.value(rows.tobytes()) if shape == (30, 4) else None)
        np.testing.assert_array_equal(checkpoint.read("table"), rows)
        checkpoint.verify(["table", "table"])
        with pytest.raises(UnknownTableError):
            checkpoint.verify(["table", "tabel"])
