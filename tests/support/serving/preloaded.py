"""What a server imports. Python's fork server imports this module once, and starts servers in forks of itself."""

import os

# As `tpuembed serve` sets them before it imports TensorFlow.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import tensorflow  # noqa: F401, ICN001
import tensorflow_serving.apis.prediction_service_pb2_grpc  # noqa: F401

import tpuembed_cli.serve  # noqa: F401
import tpuembed_serving.http.app
import tpuembed_serving.http.server  # noqa: F401
