"""Simulated quantization: the values that lookups of a table with a QuantizationConfig returned in training.

An accelerator clips and rounds every row that it looks up, before it combines rows. The checkpoint has the unrounded
rows. An export applies the same function to every stored value. So a server looks up the values of the training, at no
cost per request.
"""

import numpy as np
import numpy.typing as npt

from tpuembed.config import QuantizationConfig

__all__ = ["quantize"]


def quantize(values: npt.NDArray[np.float32], quantization: QuantizationConfig) -> None:
    """Replace `values` by the nearest of `num_buckets` levels from `lower` to `upper`. NaN stays NaN.

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
