"""Time signatures of SavedModels through TensorFlow's C API, as TensorFlow Serving runs them: no Python TensorFlow.

A child process: reads a pickled list of contenders and shapes from stdin, writes JSON to stdout. `benchmarks.lookups` is its
client.
"""

import ctypes
import dataclasses
import json
import pickle
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.capi import Output, c_library

Array = np.ndarray[Any, Any]
_FLOAT, _INT64 = 1, 9
_MINUS_ONE = b"\xff" * 9 + b"\x01"
_CALLS = {1: 20, 256: 2}
"""Batch -> calls of a contender in its turn; otherwise 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """A signature: its tensors' names by input and output, and the inputs of each shape, several of them."""

    name: str
    version: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A request's size, and by contender's name the inputs of several such requests."""

    name: str
    batch: int
    rounds: int
    feeds: Mapping[str, list[Mapping[str, Array]]]


class _Library:
    """TensorFlow's C functions, and one status for all calls."""

    def __init__(self, package: Path) -> None:
        self.tf = c_library(package)
        self.status = ctypes.c_void_p(self.tf.TF_NewStatus())

    def check(self) -> None:
        assert self.tf.TF_GetCode(self.status) == 0, self.tf.TF_Message(self.status).decode()

    def tensor(self, value: Array) -> int:
        value = np.ascontiguousarray(value)
        dims = (ctypes.c_int64 * max(value.ndim, 1))(*value.shape)
        code = _FLOAT if value.dtype == np.float32 else _INT64
        made = self.tf.TF_AllocateTensor(code, dims, value.ndim, ctypes.c_size_t(value.nbytes))
        ctypes.memmove(ctypes.c_void_p(self.tf.TF_TensorData(ctypes.c_void_p(made))), value.ctypes.data, value.nbytes)
        return int(made)

    def array(self, tensor: ctypes.c_void_p) -> Array:
        shape = [self.tf.TF_Dim(tensor, axis) for axis in range(self.tf.TF_NumDims(tensor))]
        data = ctypes.string_at(self.tf.TF_TensorData(tensor), self.tf.TF_TensorByteSize(tensor))
        return np.frombuffer(data, np.float32).reshape(shape)


class _Session:
    """A SavedModel, run by a fixed number of threads; by the one that calls, where that is 0."""

    def __init__(self, library: _Library, version: str, threads: int) -> None:
        tf, status = library.tf, library.status
        options = ctypes.c_void_p(tf.TF_NewSessionOptions())
        # ConfigProto: intra_op_ and inter_op_parallelism_threads, of which -1 is the caller's.
        config = bytes([0x10, max(threads, 1), 0x28, *([threads] if threads else _MINUS_ONE)])
        tf.TF_SetConfig(options, config, ctypes.c_size_t(len(config)), status)
        self.graph = ctypes.c_void_p(tf.TF_NewGraph())
        tags = (ctypes.c_char_p * 1)(b"serve")
        made = tf.TF_LoadSessionFromSavedModel(options, None, version.encode(), tags, 1, self.graph, None, status)
        library.check()
        self.handle = ctypes.c_void_p(made)


class _Call:
    """One signature with the tensors of its requests, ready to run."""

    def __init__(
        self, library: _Library, session: _Session, contender: Contender, feeds: list[Mapping[str, Array]]
    ) -> None:
        self._library, self._session = library, session
        self.clock = time.perf_counter
        self._inputs = self._outputs_of(contender.inputs[name] for name in contender.inputs)
        self._outputs = self._outputs_of(contender.outputs[name] for name in sorted(contender.outputs))
        count = len(contender.inputs)
        self._requests = [
            (ctypes.c_void_p * count)(*(library.tensor(feed[name]) for name in contender.inputs)) for feed in feeds
        ]

    def _outputs_of(self, names: Any) -> Any:
        pairs = [name.partition(":") for name in names]
        find = self._library.tf.TF_GraphOperationByName
        found = [Output(find(self._session.graph, name.encode()), int(index or 0)) for name, _, index in pairs]
        return (Output * len(found))(*found)

    def seconds(self, index: int) -> float:
        """Of one request; nothing but the call is timed."""
        results, seconds = self._run(index)
        for result in results:
            self._library.tf.TF_DeleteTensor(ctypes.c_void_p(result))
        return seconds

    def values(self) -> Array:
        """[batch, columns] of the first request, outputs by name side by side."""
        results, _ = self._run(0)
        return np.concatenate([self._library.array(ctypes.c_void_p(result)) for result in results], 1)

    def _run(self, index: int) -> tuple[Any, float]:
        tf, status = self._library.tf, self._library.status
        request = self._requests[index % len(self._requests)]
        results = (ctypes.c_void_p * len(self._outputs))()
        started = self.clock()
        tf.TF_SessionRun(
            self._session.handle, None, self._inputs, request, len(request), self._outputs, results, len(results), None, 0,
            None, status,
        )  # fmt: skip
        seconds = self.clock() - started
        self._library.check()
        return results, seconds

    def free(self) -> None:
        for request in self._requests:
            for tensor in request:
                self._library.tf.TF_DeleteTensor(ctypes.c_void_p(tensor))


def _measure(calls: Mapping[str, _Call], shape: Shape) -> dict[str, float]:
    """Median microseconds by contender; every round begins with another one."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names, times = list(calls), _CALLS.get(shape.batch, 1)
    for index in range(shape.rounds + 1):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            taken = [calls[name].seconds(index + turn) for turn in range(times)]
            if index:  # the first round warms up
                seconds[name] += taken
    return {name: statistics.median(taken) * 1e6 for name, taken in seconds.items()}


def _check_equal(calls: Mapping[str, _Call]) -> float:
    """The largest difference of any contender's numbers to the first one's."""
    values = [call.values() for call in calls.values()]
    return max(float(np.abs(found - values[0]).max()) for found in values)


def main() -> None:
    package, threads, cpu, contenders, shapes = pickle.loads(sys.stdin.buffer.read())
    library = _Library(Path(package))
    sessions = {version: _Session(library, version, threads) for version in {each.version for each in contenders}}
    found = {}
    for shape in shapes:
        calls = {
            each.name: _Call(library, sessions[each.version], each, shape.feeds[each.name])
            for each in contenders
            if each.name in shape.feeds
        }
        for call in calls.values():
            call.clock = time.process_time if cpu else time.perf_counter
        found[shape.name] = {"difference": _check_equal(calls), "microseconds": _measure(calls, shape)}
        for call in calls.values():
            call.free()
    assert "tensorflow" not in sys.modules
    print(json.dumps(found))


if __name__ == "__main__":
    main()
