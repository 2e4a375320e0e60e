"""TensorFlow's own pass over the graphs of a training and an evaluation step, in tensorflow-tpu's environment: what it finds.

Prints what the pass says of each call that it finds, "Found call <name> with send op(s)." or "... without ...", where the
variables have it log. No other distribution has the pass.
"""

import contextlib
import os

import tensorflow as tf

from tests.tpu.v1.models import MODELS
from tests.tpu.v1.tracing import trace


def main() -> None:
    os.dup2(1, 2)  # TensorFlow logs to the standard error
    for make in MODELS.values():
        step = trace(make()).training
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(step.graph.as_graph_def(), name="")
        with tf.compat.v1.Session(graph=graph) as session, contextlib.suppress(tf.errors.InvalidArgumentError):
            session.run(graph.get_operation_by_name(step.enqueues[0].name))  # fails later on, as there is no TPU


if __name__ == "__main__":
    main()
