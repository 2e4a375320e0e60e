"""Simulated quantization: what a table with a QuantizationConfig looked up while it was trained.

An accelerator clips and rounds every row that it looks up, before it combines rows; the checkpoint has the rows as they
were before that. The same function of each value, applied to the rows that an export stores, makes a server look up what
training did, and costs a request nothing.
"""

import numpy as np
import numpy.typing as npt

from tpuembed.config import QuantizationConfig

__all__ = ["quantize"]


def quantize(values: npt.NDArray[np.float32], quantization: QuantizationConfig) -> None:
    """Replace `values` by the nearest of `num_buckets` levels from `lower` to `upper`; NaN stays what it is.

    Source: SimulatedQuantization in tensorflow/core/protobuf/tpu/optimization_parameters.proto, and the docstring of
    `tf.tpu.experimental.embedding.QuantizationConfig`; in float32, as accelerators compute.
    """
    np.clip(values, quantization.lower, quantization.upper, out=values)
    values -= np.float32(quantization.lower)
    values /= np.float32(quantization.quantum)
    values += np.float32(0.5)
    np.floor(values, out=values)
    values *= np.float32(quantization.quantum)
    values += np.float32(quantization.lower)
