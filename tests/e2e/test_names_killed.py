"""A training whose vocabulary grows is killed again and again: checkpoints and exports have each name on its own row."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.support.killed_names import CLOCK, restored, truth_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
KILLS = 12


def test_names_keep_their_rows_when_training_is_killed(tmp_path: Path) -> None:
    moments, steps, overlays, ahead = random.Random(5), [0], 0, 0
    for run in range(KILLS):
        command = [sys.executable, "-m", "tests.support.killed_names", str(tmp_path), str(run)]
        log = tmp_path / "log"
        begun = log.read_text().count("\n") if log.exists() else 0
        with subprocess.Popen(command, start_new_session=True) as process:
            while process.poll() is None and (not log.exists() or log.read_text().count("\n") < begun + 3):
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 4))
            assert process.poll() is None
            os.killpg(process.pid, signal.SIGKILL)
        layer, runs, _ = restored(tmp_path)
        truth = truth_of(runs.numpy().tolist())
        vocabulary = layer.vocabularies["names"]
        assert len(vocabulary) == len(truth)
        rows = vocabulary.lookup(list(truth))
        assert len({*rows.tolist()}) == len(truth)
        assert rows.min() >= 1
        found = layer.named_variables()["names"].numpy()
        np.testing.assert_array_equal(found[rows, 0], list(truth.values()))
        free = np.setdiff1d(np.arange(1, vocabulary.rows), rows)
        np.testing.assert_array_equal(found[free], 1.0, "a free row has its initial value")
        steps.append(len(runs.numpy()))

        version = max((tmp_path / "m").glob("[0-9]*"), key=lambda path: int(path.name))
        logged = [json.loads(line) for line in log.read_text().splitlines()]
        history = [runs for number, runs in logged if number == int(version.name)][-1]
        exported = truth_of(history)
        loaded = tf.saved_model.load(str(version))
        names = list(exported)
        answers = loaded.signatures["serving_default"](f=tf.constant(names)[:, None])["f"].numpy()
        np.testing.assert_array_equal(answers[:, 0], list(exported.values()))
        assert exported[CLOCK] == 1 - len(history)
        ahead += len(history) > steps[-1]
        overlays += "overlay" in (version / "assets.extra" / "tpuembed.json").read_text()
    assert steps == sorted(steps)
    assert steps[-1] > 3 * KILLS
    assert overlays
    print(f"{ahead} of {KILLS} exports were ahead of the newest checkpoint")
