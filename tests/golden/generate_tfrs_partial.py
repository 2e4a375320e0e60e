"""Writes tests/golden/tfrs/partial_model: a trained Keras 2 model with a PartialTPUEmbedding; see README.md beside it."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

from tests.golden.generate_tfrs import Golden, add_mid_level_tables, randomise

E = tf.tpu.experimental.embedding
VIDEO = E.TableConfig(vocabulary_size=11, dim=4, name="video", combiner="mean")
USER = E.TableConfig(vocabulary_size=9, dim=3, name="user", combiner="sum")
COUNTRY = E.TableConfig(vocabulary_size=5, dim=2, name="country", combiner="mean")
KIND = E.TableConfig(vocabulary_size=7, dim=3, name="kind", combiner="mean")
FEATURES = {
    "born": E.FeatureConfig(table=COUNTRY),
    "fav": E.FeatureConfig(table=VIDEO),
    "kind": E.FeatureConfig(table=KIND),
    "lives": E.FeatureConfig(table=COUNTRY),
    "user": E.FeatureConfig(table=USER),
}
IDS = {"born": [0, 4, 2], "fav": [10, 3, 3], "kind": [6, 0, 1], "lives": [1, 1, 4], "user": [8, 0, 8]}


class Model(tf.keras.Model):
    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.embedding_layer = tfrs.experimental.layers.embedding.PartialTPUEmbedding(
            FEATURES, optimizer=optimizer, size_threshold=7
        )
        self.logits = tf.keras.layers.Dense(1)

    def call(self, ids: Any) -> Any:
        return self.logits(tf.concat(tf.nest.flatten(self.embedding_layer(ids)), axis=1))


def main() -> None:
    """One optimizer trains everything, as TensorFlow Recommenders has it on CPUs, and is in the checkpoint."""
    golden = Golden("partial_model")
    optimizer = tf.keras.optimizers.legacy.Adagrad(0.1)
    model = Model(optimizer)
    ids = {name: tf.constant(values) for name, values in IDS.items()}
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(model(ids)))
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    randomise([*model.trainable_variables, *optimizer.variables()[1:]], 11)
    layer = model.embedding_layer
    add_mid_level_tables(golden, layer.tpu_embedding, optimizer, {"accumulator": "accumulators"})
    for feature in ("born", "kind"):  # the reader calls a small table by the first of its features
        table = layer.keras_embedding_layers[feature].embeddings
        golden.table(feature, table.numpy(), {"accumulators": optimizer.get_slot(table, "accumulator").numpy()})
    found = layer(ids)
    golden.truth["activations"] = {name: golden.array(f"{name}-activations", found[name]) for name in FEATURES}
    golden.truth["ids"] = IDS
    golden.truth["scores"] = np.asarray(model(ids)).tolist()
    tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(golden.folder / "ckpt"))
    golden.finish("ckpt-1")


if __name__ == "__main__":
    main()
