"""Requests of TensorFlow Serving's PredictionService."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.core.framework import tensor_pb2, types_pb2
from tensorflow_serving.apis import predict_pb2

from tests.support.serving.doubles import DoublingServable
from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.servable import LoadedVersion, Signature, TensorInfo
from tpuembed_serving.grpc.inputs import int64_columns
from tpuembed_serving.grpc.prediction_service import GrpcPredict


def test_a_value_that_is_repeated_often_is_slow_work() -> None:
    """A message of 60 bytes filled 64 MiB on the event loop."""
    for size, is_slow in ((1000, False), (1_000_000, True)):
        request, slow = predict_pb2.PredictRequest(), list[int]()
        request.model_spec.name = "m"
        tensor = request.inputs["x"]
        tensor.dtype = types_pb2.DT_INT64
        tensor.tensor_shape.dim.add().size = size
        tensor.int64_val.append(7)
        prediction = GrpcPredict()
        prediction.parse(request.SerializeToString(), noop)
        (task,) = prediction.decode(LoadedVersion(1, DoublingServable()), lambda size=0, slow=slow: slow.append(size))
        np.testing.assert_array_equal(task.inputs[0], np.full(size, 7))
        assert (max(slow, default=0) > 16 * 2**10) is is_slow


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


@pytest.mark.parametrize("rows", [1, 2, 500])
@pytest.mark.parametrize("in_content", [True, False])
def test_usual_inputs_are_read_together(rows: int, in_content: bool) -> None:
    request, random = predict_pb2.PredictRequest(), np.random.default_rng(rows)
    sent = random.integers(-(2**63), 2**63 - 1, (len(NAMES), rows))
    for name, values in zip(NAMES, sent, strict=True):
        content = {"tensor_content": values.tobytes()} if in_content else {"int64_val": values}
        request.inputs[name].CopyFrom(tensor_pb2.TensorProto(dtype=types_pb2.DT_INT64, **content))
        request.inputs[name].tensor_shape.dim.add().size = rows
    found = int64_columns(request, INT64S)
    assert found is not None
    np.testing.assert_array_equal(found.matrix, sent.T)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_answers_have_the_bytes_of_protobufs_own_encoding(data: Any) -> None:
    """The fields are set one by one here."""
    wanted = predict_pb2.PredictResponse()
    wanted.model_spec.name, wanted.model_spec.signature_name = "m", "serving_default"
    wanted.model_spec.version.value = 7
    dtype = data.draw(st.sampled_from(["float", "double", "int64", "int32"]))
    field = {"float": "float_val", "double": "double_val", "int64": "int64_val", "int32": "int_val"}[dtype]
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    values = np.random.default_rng(len(shape)).integers(-9, 9, shape)
    tensor = wanted.outputs["y"]
    tensor.dtype = getattr(types_pb2, f"DT_{dtype.upper()}")
    tensor.tensor_shape.SetInParent()
    for size in shape:
        tensor.tensor_shape.dim.add().size = size
    getattr(tensor, field).extend(values.ravel().tolist())

    output = TensorInfo("y", "y:0", dtype, np.dtype(dtype.replace("float", "float32")))
    servable = DoublingServable()
    servable.signatures = {"serving_default": Signature("serving_default", INT64S.inputs, (output,))}
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "m"
    for name in NAMES:
        request.inputs[name].CopyFrom(tf.make_tensor_proto(np.zeros(1, np.int64)))
    prediction, loaded = GrpcPredict(), LoadedVersion(7, servable)
    prediction.parse(request.SerializeToString(), noop)
    prediction.decode(loaded, noop)
    assert prediction.encode(loaded, [{"y": values.astype(output.numpy_dtype)}], noop) == wanted.SerializeToString()
