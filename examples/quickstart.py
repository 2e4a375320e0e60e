"""Train, checkpoint, export: the README's example."""

import keras
import tensorflow as tf
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model

def build():
    inputs = {"user": keras.Input((), dtype="int64", name="user"),
              "watched": keras.Input((None,), dtype="int64", ragged=True, name="watched")}
    features = {"user": FeatureConfig(TableConfig(1_000, 16, "users")),
                "watched": FeatureConfig(TableConfig(5_000, 16, "videos", combiner="mean"))}
    rows = TPUEmbedding(features, optimizer="adam")(inputs)  # the layer trains its tables, with Adam
    joined = keras.ops.concatenate([rows["user"], rows["watched"]], 1)
    return keras.Model(inputs, keras.layers.Dense(1, name="score")(joined))

if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    model = build()
    model.compile(optimizer="adagrad", loss="mse")  # the dense part, with Adagrad
    examples = {"user": tf.constant([1, 2, 3], tf.int64),
                "watched": tf.ragged.constant([[3, 14], [159], [2, 65, 358]], dtype=tf.int64)}
    model.fit(tf.data.Dataset.from_tensors((examples, tf.ones((3, 1)))).repeat(20), verbose=0, shuffle=False)
    print("scores:", model(examples).numpy().round(4).ravel())
    checkpoint = tf.train.Checkpoint(model=model).write("quickstart/ckpt")
    print("export:", export_saved_model(checkpoint, "quickstart/recommender", model=build).path)
