"""A model that is dropped frees its tables and slots, whatever traced it."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

# Each model has 5 MB of table and 5 MB of slots. The first ones warm TensorFlow up.
PROGRAM = """
import gc, json, os, time
import keras, numpy as np, tensorflow as tf
from tests.support.memory import resident_bytes
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

IDS, LABELS = np.arange(32), np.ones((32, 1), np.float32)

def make():
    ids = keras.Input((), dtype="int64", name="ids")
    layer = TPUEmbedding({"ids": FeatureConfig(TableConfig(80_000, 16, "items"))}, optimizer="adagrad")
    model = keras.Model(ids, keras.layers.Dense(1)(layer({"ids": ids})["ids"]))
    model.compile("adagrad", "mse")
    return model

def fit(model):
    model.fit(IDS, LABELS, verbose=0)

def predict(model):
    model.predict(IDS, verbose=0)

def function(model):
    optimizer = keras.optimizers.SGD(0.1)
    @tf.function
    def step(ids, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(ids) - labels))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    step(tf.constant(IDS), tf.constant(LABELS))

def clone(model):
    copy = keras.models.clone_model(model)
    copy.compile("sgd", "mse")
    fit(copy)

def once(use, kept):
    if kept is None:
        use(make())
    else:  # one model, compiled and traced again
        kept.compile("adagrad", "mse")
        fit(kept)
    keras.backend.clear_session()
    gc.collect()

growth = {}
for use in (fit, predict, function, clone, None):
    kept = make() if use is None else None
    for _ in range(2):
        once(use, kept)
    before = resident_bytes(os.getpid())
    for _ in range(4):
        once(use, kept)
    for _ in range(100):  # on a busy machine, threads of TensorFlow's datasets let go of the last round late
        gc.collect()
        grown = resident_bytes(os.getpid()) - before
        if grown < 5 << 20:
            break
        time.sleep(0.1)
    growth["compile" if use is None else use.__name__] = grown
print(json.dumps(growth))
"""


def test_many_dropped_models_take_less_memory_than_one() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    growth = json.loads(done.stdout)
    assert len(growth) == 5
    assert max(growth.values()) < 10 << 20, growth
