"""Requests of TensorFlow Serving's PredictionService."""

import numpy as np
from tensorflow.core.framework import types_pb2
from tensorflow_serving.apis import predict_pb2

from tests.support.serving.doubles import DoublingServable
from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.servable import LoadedVersion
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
