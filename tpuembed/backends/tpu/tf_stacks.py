"""The stacks that TensorFlow would make of tables. Like `tf_config` and `tf_tpu`, it uses TensorFlow's private names."""

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.tpu import tpu_embedding_v3

from tpuembed.backends.tpu.stacked_table import StackLayout

__all__ = ["stack_tables"]


def stack_tables(
    features: Sequence[Any], chips: int, cores_per_chip: int, stacking: bool = True
) -> dict[str, tuple[StackLayout, tuple[int, int]]]:
    """Return {table name: (the layout that TensorFlow would give it, its padded shape)}, without TPUs.

    Args:
        features: TensorFlow's FeatureConfig, with the output_shape of one chip. They are not changed.
        chips: the number of chips that hold the tables.
        cores_per_chip: the SparseCores of each chip.
        stacking: False makes one stack per table.
    """
    own = tpu_embedding_v3._clone_feature_config(list(features))
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "MessageFactory class is deprecated"
        )  # a warning of protobuf 5 about TensorFlow 2.19's code
        stacked = tpu_embedding_v3._stack_tables_with_same_table_dim_and_optimizer(
            list({id(feature.table): feature.table for feature in own}.values()),
            [(str(index), feature) for index, feature in enumerate(own)],
            chips,
            cores_per_chip,
            tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig(disable_table_stacking=not stacking),
        )
    return {
        name: (StackLayout.of(proto), (proto.unsharded_padded_shape[0], proto.unsharded_padded_shape[1]))
        for name, proto in stacked.table_to_layout.items()
    }
