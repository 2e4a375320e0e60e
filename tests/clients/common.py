"""What the scripts of the clients share: the server, the tensors, and comparisons. They run in the clients' environment."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

NUMBERS = {
    "BOOL": np.array([[True, False, True]]),
    "UINT8": np.array([[0, 255, 7]], np.uint8),
    "UINT16": np.array([[0, 65535, 7]], np.uint16),
    "UINT32": np.array([[0, 2**32 - 1, 7]], np.uint32),
    "UINT64": np.array([[0, 2**64 - 1, 7]], np.uint64),
    "INT8": np.array([[-128, 127, 7]], np.int8),
    "INT16": np.array([[-32768, 32767, 7]], np.int16),
    "INT32": np.array([[-(2**31), 2**31 - 1, 7]], np.int32),
    "INT64": np.array([[-(2**63), 2**63 - 1, 7]], np.int64),
    "FP16": np.array([[0.1, -65504, 6e-8]], np.float16),
    "FP32": np.array([[0.1, -3.4e38, 1e-45]], np.float32),
    "FP64": np.array([[0.1, -1.7e308, 5e-324]], np.float64),
}
BF16 = np.array([[0.1, -3.3e38, 1e-40]], ml_dtypes.bfloat16)
BYTES = np.array([[b"", b"a\x00b", "€ ü".encode()]], object)
NOT_UTF8 = np.array([[b"\xff\xfe", b"a"]], object)
EMPTY = np.empty((0, 3), np.float32)
ALL = {**NUMBERS, "BF16": BF16, "BYTES": BYTES}
IN_JSON = {name: value for name, value in ALL.items() if name not in ("FP16", "BF16")}
"""The clients send these two as binary data only."""


class Server:
    """Where the server listens, and what TensorFlow itself answers."""

    def __init__(self, rest: str, grpc: str, tensors: str) -> None:
        self.rest, self.grpc = rest, grpc
        with np.load(tensors) as found:
            self.ids, self.embedding = found["ids"], found["embedding"]


def same(found: Any, wanted: Any) -> None:
    found = np.asarray(found)
    assert found.shape == wanted.shape, (found, wanted)
    assert found.dtype == wanted.dtype, (found.dtype, wanted.dtype)
    values = [one.encode() if isinstance(one, str) else one for one in found.ravel().tolist()]  # JSON has strings alone
    assert values == wanted.ravel().tolist(), (found, wanted)


def main(cases: Mapping[str, Callable[[Server], None]]) -> None:
    """Run `CASE REST GRPC TENSORS`.

    Args:
        cases: by name. REST and GRPC are HOST:PORT of a server whose model `m` has a signature of each datatype, which returns
            its input. TENSORS is an .npz file: `ids` of the default signature, and `embedding`, TensorFlow's result for them.
    """
    case, *where = sys.argv[1:]
    cases[case](Server(*where))
