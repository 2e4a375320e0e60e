"""TensorFlow's own host kernels in the simulator's place for them, each call compared with the simulator's to the bit.

Only tensorflow-tpu has the kernels.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from tensorflow.python.tpu.ops import gen_xla_ops

from tpuembed.testing.host_ops import HostOps
from tpuembed.testing.sparse_core_ops import SparseCoreOps

__all__ = ["LiveOps", "calls", "same_bits"]

Array = np.ndarray[Any, Any]

calls: dict[str, int] = {}
"""Kernel -> how often it ran and was compared."""
CSR = "convert_to_sparse_core_csr_wrapped_coo_tensor"


class LiveOps(SparseCoreOps):
    """The simulator with TensorFlow's kernels on the host."""

    def convert_to_list_of_sparse_core_coo_tensors(self, **arguments: Any) -> Any:
        return _both("convert_to_list_of_sparse_core_coo_tensors", arguments)

    def sort_list_of_sparse_core_coo_tensors(self, **arguments: Any) -> Any:
        return _both("sort_list_of_sparse_core_coo_tensors", arguments)

    def convert_to_sparse_core_csr_wrapped_coo_tensor(self, **arguments: Any) -> Any:
        return _both(CSR, arguments)


def _both(op: str, arguments: Mapping[str, Any]) -> Any:
    """What the kernel makes of the arguments; the simulator's must be the same."""
    theirs = getattr(gen_xla_ops, op)(**arguments)
    ours = getattr(HostOps(), op)(**{name: _plain(value) for name, value in arguments.items()})
    calls[op] = calls.get(op, 0) + 1
    written = _written if op == CSR else list
    for mine, truth in zip(_flat(written(ours)), _flat(written(theirs)), strict=True):
        assert same_bits(mine, truth), f"{op}: the simulator makes {mine} of what the kernel makes {truth}"
    return theirs


def same_bits(mine: Any, truth: Any) -> bool:
    """Whether two arrays are equal, bit by bit where they are of floats."""
    mine, truth = np.asarray(mine), np.asarray(truth)
    if truth.dtype != np.float32:
        return bool(np.array_equal(mine, truth))
    return mine.dtype == truth.dtype and bool(np.array_equal(mine.view(np.int32), truth.view(np.int32)))


def _written(outputs: Any) -> list[Any]:
    """Of a CSR buffer what the kernel writes, padding included, and the sizes of all of it."""
    pointers, samples, rows, gains, pointers_used, ids_used, minibatches = map(np.asarray, outputs)
    buffers = [buffer[: int(ids_used)] for buffer in (samples, rows, gains)]
    sizes = [len(array) for array in (pointers, samples, rows, gains)]
    return [pointers[: int(pointers_used)], *buffers, sizes, pointers_used, ids_used, minibatches]


def _plain(value: Any) -> Any:
    if isinstance(value, list) and value and hasattr(value[0], "shape"):
        return [np.asarray(item) for item in value]
    return np.asarray(value) if hasattr(value, "shape") else value


def _flat(values: Any) -> list[Any]:
    return [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]
