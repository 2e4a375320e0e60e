"""Predict over gRPC of several int64 inputs, which are read together: each is what TensorFlow reads, or is refused."""

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.core.framework import types_pb2
from tensorflow_serving.apis import predict_pb2

from tests.support.serving.doubles import EchoServable, signature, wait_for
from tests.support.serving.served import PREDICT, Served

NAMES = ("a", "b", "c")


class Columns(EchoServable):
    """Returns its inputs, three of int64."""

    def __init__(self) -> None:
        super().__init__()
        three = dict.fromkeys(NAMES, "int64")
        self.signatures = {"serving_default": signature(three, three, "serving_default")}


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("columns")
    with pytest.MonkeyPatch.context() as patch, Served(folder, patch, lambda _: Columns()) as server:
        wait_for(lambda: server.is_ready)
        with server.channel() as channel:
            yield channel.unary_unary(PREDICT)


@st.composite
def requests(draw: Any) -> Any:
    """A PredictRequest of int64 tensors, in which something may be wrong or unusual."""
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "m"
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
        tensor.dtype = draw(st.sampled_from([types_pb2.DT_INT64] * 19 + [types_pb2.DT_UINT64]))
        for each in draw(st.sampled_from([[size]] * 19 + [[size, 1], [], [-1], [size + 1]])):
            tensor.tensor_shape.dim.add().size = each
        tensor.tensor_shape.unknown_rank = draw(st.sampled_from([False] * 19 + [True]))
    return request


@settings(max_examples=500)
@given(requests())
def test_inputs_that_are_read_together_are_those_that_tensorflow_reads(call: Any, request: Any) -> None:
    done = call.future(request.SerializeToString(), timeout=60)
    if done.code() is not grpc.StatusCode.OK:
        assert done.code() is grpc.StatusCode.INVALID_ARGUMENT
        return
    answer = predict_pb2.PredictResponse.FromString(done.result())
    assert sorted(request.inputs) == sorted(answer.outputs) == list(NAMES)
    for name in NAMES:
        wanted = tf.io.parse_tensor(request.inputs[name].SerializeToString(), tf.int64).numpy()
        np.testing.assert_array_equal(tf.make_ndarray(answer.outputs[name]), wanted, strict=True)
