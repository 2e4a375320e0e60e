"""Time signatures of SavedModels through TensorFlow's C API, as TensorFlow Serving runs them: no Python TensorFlow.

A child process: reads a pickled list of contenders and shapes from stdin, writes JSON to stdout. `benchmarks.lookups` is its
client.
"""

import ctypes
import dataclasses
import json
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.capi import Output, c_library
from tpuembed.manifest import Manifest
from tpuembed.native.lookup import NativeLookups, _in_threads

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
    how: str = "signature"
    """Or "native": native lookups of that export, or "bound": the loop of pooled_rows.c in its tables."""


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


class _NativeCall:
    """Native lookups with the inputs of its requests: `packed` of a matrix, or named ones."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, version: str, threads: int, feeds: list[Mapping[str, Array]]) -> None:
        manifest = Manifest.read(Path(version))
        assert manifest is not None
        self._lookups = NativeLookups(manifest, Path(version), threads=max(threads, 1))
        self._feeds, self._threads = feeds, max(threads, 1)

    def seconds(self, index: int) -> float:
        feed = self._feeds[index % len(self._feeds)]
        started = self.clock()
        self._run(feed)
        return self.clock() - started

    def values(self) -> Array:
        found = self._run(self._feeds[0])
        return found if isinstance(found, np.ndarray) else np.concatenate([found[name] for name in sorted(found)], 1)

    def _run(self, feed: Mapping[str, Array]) -> Any:
        return self._lookups.packed(feed["ids"]) if list(feed) == ["ids"] else self._lookups.named(feed)

    def free(self) -> None:
        self._feeds = []


class _BoundCall(_NativeCall):
    """The loop of pooled_rows.c in the same tables."""

    def __init__(self, version: str, threads: int, feeds: list[Mapping[str, Array]]) -> None:
        super().__init__(version, threads, feeds)
        structs = self._lookups._structs
        places = [one.rows + one.row_offset * one.row_bytes for one in structs]
        self._tables = (ctypes.c_void_p * len(places))(*places)
        self._count, self._width = len(places), sum(one.dim for one in structs)
        self._loop = _bound()

    def _run(self, feed: Mapping[str, Array]) -> Array:
        ids = feed["ids"]
        out = np.empty((len(ids), self._width), np.float32)
        hot = ids.shape[1] // self._count
        pointers = self._tables, self._count, ids.ctypes.data, hot, out.ctypes.data
        bounds = np.linspace(0, len(ids), min(4 * self._threads, len(ids)) + 1, dtype=np.int64).tolist()
        if self._threads == 1 or len(ids) < 4 * self._threads:
            self._loop(*pointers, 0, len(ids))
        else:
            _in_threads(self._threads, [partial(self._loop, *pointers, *pair) for pair in pairwise(bounds)])
        return out


@cache
def _bound() -> Any:
    source = Path(__file__).with_name("pooled_rows.c")
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/bound.so"
        command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, str(source)]
        subprocess.run(command, check=True)
        loop = ctypes.CDLL(library).sum_rows
    loop.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 2,
    ]
    loop.restype = None
    return loop


def _measure(calls: Mapping[str, Any], shape: Shape) -> dict[str, float]:
    """Median microseconds by contender. Every round has another order: memory that one frees is warm for the next."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names, times, random = list(calls), _CALLS.get(shape.batch, 1), np.random.default_rng(0)
    for index in range(shape.rounds + 1):
        for place, name in enumerate(random.permutation(names).tolist()):
            # Neighbours take different requests: the rows of the last one are in the processor's cache.
            taken = [calls[name].seconds(times * (index + place) + turn) for turn in range(times)]
            if index:  # the first round warms up
                seconds[name] += taken
    return {name: statistics.median(taken) * 1e6 for name, taken in seconds.items()}


def _check_equal(calls: Mapping[str, Any]) -> float:
    """The largest difference of any contender's numbers to the first one's."""
    values = [call.values() for call in calls.values()]
    return max(float(np.abs(found - values[0]).max()) for found in values)


def _call(
    library: _Library, session: _Session, contender: Contender, threads: int, feeds: list[Mapping[str, Array]]
) -> Any:
    if contender.how == "signature":
        return _Call(library, session, contender, feeds)
    return (_NativeCall if contender.how == "native" else _BoundCall)(contender.version, threads, feeds)


def main() -> None:
    package, threads, cpu, contenders, shapes = pickle.loads(sys.stdin.buffer.read())
    library = _Library(Path(package))
    sessions = {version: _Session(library, version, threads) for version in {each.version for each in contenders}}
    found = {}
    for shape in shapes:
        calls = {
            each.name: _call(library, sessions[each.version], each, threads, shape.feeds[each.name])
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
