"""Warm-up records, byte by byte."""

from pathlib import Path

import numpy as np
import tensorflow as tf

from tpuembed.export.graph.warmup import WARMUP_PATH, write_warmup
from tpuembed.manifest import Packing

NAMES = ("watched", "user", "friends", "history", "b", "a", "zip", "liked", "country", "device")


def test_examples_have_their_features_in_the_order_of_names(tmp_path: Path) -> None:
    """Which is equal in every process: protobuf's own order of a map is not."""
    inputs = {name: np.zeros((2, 1), np.int64) for name in NAMES}
    write_warmup(tmp_path, [inputs], {"serving_examples": None}, Packing(left_out="here"))
    [record] = tf.data.TFRecordDataset(str(tmp_path / WARMUP_PATH)).as_numpy_iterator()
    # A feature in an Example: the field 1 of its map's entry is the name.
    places = [(record.index(b"\x0a" + bytes([len(name)]) + name.encode() + b"\x12"), name) for name in NAMES]
    assert [name for _, name in sorted(places)] == sorted(NAMES)
