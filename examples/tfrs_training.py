"""Code written for TensorFlow Recommenders' TPUEmbedding: only its import is changed (and `tf.concat` of Keras tensors).

Runs on CPUs under the default strategy, or under the strategy of TPUs: the steps are the same.
"""

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tpuembed.compat.tfrs import TPUEmbedding, translate_keras_optimizer

embedding = tf.tpu.experimental.embedding
BATCH, STEPS, USERS, VIDEOS = 16, 4, 40, 60

user_table = embedding.TableConfig(USERS, 8, name="users", combiner="mean")
video_table = embedding.TableConfig(VIDEOS, 8, name="videos", combiner="sum")
feature_config = {
    "user": embedding.FeatureConfig(user_table, name="user"),
    "watched": embedding.FeatureConfig(video_table, name="watched"),
    "candidate": embedding.FeatureConfig(video_table, name="candidate"),
}


def functional_model(optimizer: Any) -> Any:
    """The layer in a functional model: features in, logits out."""
    inputs = {
        "user": keras.Input(batch_size=BATCH, shape=(), dtype="int32", name="user"),
        "watched": keras.Input(batch_size=BATCH, shape=(None,), dtype="int32", ragged=True, name="watched"),
        "candidate": keras.Input(batch_size=BATCH, shape=(), dtype="int32", name="candidate"),
    }
    activations = TPUEmbedding(feature_config=feature_config, optimizer=optimizer)(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.ops.concatenate(tf.nest.flatten(activations), axis=1)))


class SubclassModel(keras.Model):
    """The layer as an attribute of a model of one's own."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.embedding_layer = TPUEmbedding(feature_config=feature_config, optimizer=optimizer)
        self.logits = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.logits(tf.concat(tf.nest.flatten(self.embedding_layer(inputs)), axis=1))


def dataset(_: Any = None) -> Any:
    """Batches of (labels, features): even videos are liked."""
    random = np.random.default_rng(0)
    users, candidates = random.integers(0, USERS, 256), random.integers(0, VIDEOS, 256)
    lengths = random.integers(0, 4, 256)
    watched = tf.RaggedTensor.from_row_lengths(random.integers(0, VIDEOS, lengths.sum()).astype(np.int32), lengths)
    features = {"user": users.astype(np.int32), "watched": watched, "candidate": candidates.astype(np.int32)}
    labels = (candidates % 2 == 0).astype(np.float32)[:, None]
    return tf.data.Dataset.from_tensor_slices((labels, features)).batch(BATCH, drop_remainder=True).repeat()


def training_step(strategy: Any, model: Any, optimizer: Any) -> Any:
    """One optimizer for all variables; the layer trains its tables when its gradients are taken."""

    @tf.function
    def run(iterator: Any, num_steps: Any) -> None:
        def tpu_step(inputs: Any) -> None:
            labels, features = inputs
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(features))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for _ in tf.range(num_steps):
            strategy.run(tpu_step, args=(next(iterator),))

    return run


def separate_training_step(strategy: Any, model: Any, dense_optimizer: Any, embedding_optimizer: Any) -> Any:
    """Gradients divided by the identity of their variables, for two optimizers."""

    @tf.function
    def run(iterator: Any, num_steps: Any) -> None:
        def tpu_step(inputs: Any) -> None:
            labels, features = inputs
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(features))
            pairs = list(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))
            of_embedding = {id(variable) for variable in model.embedding_layer.trainable_variables}
            dense_optimizer.apply_gradients([pair for pair in pairs if id(pair[1]) not in of_embedding])
            embedding_optimizer.apply_gradients([pair for pair in pairs if id(pair[1]) in of_embedding])

        for _ in tf.range(num_steps):
            strategy.run(tpu_step, args=(next(iterator),))

    return run


def evaluation_step(strategy: Any, model: Any, accuracy: Any) -> Any:
    @tf.function
    def run(iterator: Any, num_steps: Any) -> None:
        def tpu_step(inputs: Any) -> None:
            labels, features = inputs
            accuracy.update_state(labels, model(features))

        for _ in tf.range(num_steps):
            strategy.run(tpu_step, args=(next(iterator),))

    return run


def loss_of(labels: Any, logits: Any) -> Any:
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))


def serve(model: Any, folder: str) -> None:
    """A signature that looks up one feature of one table, by a part of the feature config."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="examples")])
    def serve_examples(examples: Any) -> Any:
        parsed = tf.io.parse_example(examples, {"candidate": tf.io.FixedLenFeature([], tf.int64)})
        return model.embedding_layer(parsed, serving_config={"candidate": feature_config["candidate"]})

    tf.saved_model.save(model.embedding_layer, folder, signatures={"serving": serve_examples})


def main(folder: str) -> dict[str, float]:
    strategy = tf.distribute.get_strategy()
    options = tf.distribute.InputOptions(experimental_fetch_to_device=False)
    iterator = iter(strategy.distribute_datasets_from_function(dataset, options=options))
    found = {}
    for name, build in (("functional", functional_model), ("subclass", SubclassModel)):
        with strategy.scope():
            model, optimizer = build(embedding.SGD(0.1)), keras.optimizers.SGD(0.1)
            model(next(iterator)[1])  # Keras 3 builds its optimizers' variables for a model that is built
            optimizer.build(model.trainable_variables)
        training_step(strategy, model, optimizer)(iterator, tf.constant(STEPS))
        found[name] = evaluate(strategy, model, iterator)

    with strategy.scope():
        schedule = keras.optimizers.schedules.ExponentialDecay(0.5, decay_steps=100, decay_rate=0.9)
        embedding_optimizer, dense_optimizer = keras.optimizers.Adagrad(schedule), keras.optimizers.Adam(0.1)
        model = SubclassModel(translate_keras_optimizer(embedding_optimizer))
        model(next(iterator)[1])
        embedding_optimizer.build(model.embedding_layer.trainable_variables)
        own = {id(variable) for variable in model.embedding_layer.trainable_variables}
        dense_optimizer.build([variable for variable in model.trainable_variables if id(variable) not in own])
    separate_training_step(strategy, model, dense_optimizer, embedding_optimizer)(iterator, tf.constant(20 * STEPS))
    found["separate"] = evaluate(strategy, model, iterator)
    tf.train.Checkpoint(model=model, optimizer=embedding_optimizer).save(f"{folder}/ckpt")
    serve(model, f"{folder}/served")
    return found


def evaluate(strategy: Any, model: Any, iterator: Any) -> float:
    with strategy.scope():
        accuracy = keras.metrics.BinaryAccuracy(threshold=0.0)
    evaluation_step(strategy, model, accuracy)(iterator, tf.constant(STEPS))
    return float(accuracy.result())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="tfrs_training")
    print(main(parser.parse_args().folder))
