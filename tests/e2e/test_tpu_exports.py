"""From TPU checkpoints, as TensorFlow's own classes write them, to lookups in an export."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.partitioned import TABLE, partitioned
from tests.support.checkpoint.tpu_checkpoints import SHAPES, host_embedding, random_values, sparse_core_embedding, write
from tests.support.messages import said
from tpuembed.export import export_saved_model

FEATURES = {name.replace("/", "_").replace(".", "_"): name for name in SHAPES}
CONFIG = {"features": {feature: {"table": table, "input": "id"} for feature, table in FEATURES.items()}}


@pytest.mark.nightly
@pytest.mark.parametrize("hardware", ["8 devices of SparseCores", "4 hosts"])
def test_every_row_of_every_table_is_served(tmp_path: Path, hardware: str) -> None:
    values = random_values(SHAPES, "adagrad")
    embedding: Any = (
        host_embedding(values, "adagrad", 4)
        if hardware == "4 hosts"
        else sparse_core_embedding(values, "adagrad", devices=8)
    )
    report = export_saved_model(
        write(tmp_path / "ckpt", embedding), tmp_path / "model", serving_config=CONFIG, workers=2
    )
    serve = tf.saved_model.load(str(report.path)).signatures["serving_default"]
    rows = np.arange(max(rows for rows, _ in SHAPES.values()))
    ids = {feature: rows % SHAPES[table][0] for feature, table in FEATURES.items()}
    served = serve(**{feature: tf.constant(of_feature) for feature, of_feature in ids.items()})
    for feature, table in FEATURES.items():
        np.testing.assert_array_equal(served[feature], values[table]["parameters"][ids[feature]])


def command(*arguments: object) -> "subprocess.CompletedProcess[str]":
    run = [sys.executable, "-m", "tpuembed_cli.main", *map(str, arguments)]
    return subprocess.run(run, capture_output=True, text=True, check=False)


@pytest.mark.nightly
def test_the_command_is_told_what_the_files_do_not_say(tmp_path: Path) -> None:
    prefix = partitioned(tmp_path, "0,4:-", "4,4:-", "8,3:-")
    config = tmp_path / "serving.yaml"
    config.write_text("features: {x: {table: emb, input: id}}")
    export = ("export", prefix, tmp_path / "model", "--serving-config", config)
    refused = command(*export)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    said(refused.stderr)
    assert command(*export, "--checkpoint-option", "partition_strategy").returncode == 2
    done = command(*export, "--checkpoint-option", "partition_strategy=mod")
    assert done.returncode == 0, done.stderr
    serve = tf.saved_model.load(str(tmp_path / "model" / "1")).signatures["serving_default"]
    np.testing.assert_array_equal(serve(x=tf.constant([0, 1, 2, 3], tf.int64))["x"], TABLE[[0, 4, 8, 1]])
