"""Warnings name the line of the caller."""

import pytest
import tensorflow as tf

from tpuembed import TPUEmbedding


def test_a_warning_names_the_callers_line() -> None:
    config = tf.tpu.experimental.embedding
    features = {"a": config.FeatureConfig(config.TableConfig(4, 2))}
    with pytest.warns(UserWarning, match="without a name") as found:
        TPUEmbedding(features)
    assert {warning.filename for warning in found} == {__file__}
