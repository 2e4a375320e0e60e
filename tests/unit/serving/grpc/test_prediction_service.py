"""Requests of TensorFlow Serving's PredictionService."""

from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.core.framework import types_pb2
from tensorflow_serving.apis import predict_pb2

from tpuembed_serving.core.servable import Signature, TensorInfo
from tpuembed_serving.grpc.prediction_service import int64_columns

NAMES = ("a", "b", "c")
INT64S = Signature(
    "serving_default", tuple(TensorInfo(name, f"{name}:0", "int64", np.dtype(np.int64)) for name in NAMES), ()
)


@st.composite
def requests(draw: Any) -> Any:
    """A PredictRequest of int64 tensors, in which something may be wrong or unusual."""
    request = predict_pb2.PredictRequest()
    size = draw(st.integers(0, 3))
    for name in draw(st.sampled_from([NAMES] * 8 + [("a", "b"), ("a", "b", "d"), ("a", "b", "c", "d")])):
        tensor = request.inputs[name]
        values = draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=size, max_size=size))
        if draw(st.sampled_from([False] * 19 + [True])):
            values = values[:-1]
        if draw(st.booleans()):
            tensor.tensor_content = np.array(values, "<i8").tobytes()
        else:
            tensor.int64_val.extend(values)
        dtypes = [types_pb2.DT_INT64] * 19 + [types_pb2.DT_UINT64]
        tensor.dtype = draw(st.sampled_from(dtypes))
        for each in draw(st.sampled_from([[size]] * 19 + [[size, 1], [], [-1], [size + 1]])):
            tensor.tensor_shape.dim.add().size = each
        tensor.tensor_shape.unknown_rank = draw(st.sampled_from([False] * 19 + [True]))
    return request


@settings(max_examples=500, deadline=None)
@given(requests())
def test_inputs_that_are_read_together_are_those_that_tensorflow_reads(request: Any) -> None:
    found = int64_columns(request, INT64S)
    if found is None:
        return
    assert sorted(request.inputs) == list(NAMES)
    for name, array in zip(NAMES, found, strict=True):
        wanted = tf.io.parse_tensor(request.inputs[name].SerializeToString(), tf.int64).numpy()
        np.testing.assert_array_equal(array, wanted, strict=True)
