"""Run a SavedModel through the TensorFlow C API alone, as TensorFlow Serving's loader does: no Python TensorFlow.

Run as a script in a process of its own: reads pickled requests from stdin and writes the pickled outputs of each to stdout.
`predict` and `Process` are its clients.
"""

import atexit
import contextlib
import ctypes
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self, cast

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_CODES: dict[int, np.dtype[Any]] = {
    code: np.dtype(kind) for code, kind in ((1, np.float32), (3, np.int32), (9, np.int64), (23, np.uint64))
}
_STRING, _STRING_SIZE = 7, 24  # the code of the type, and the bytes of a TF_TString


class TensorFlowError(RuntimeError):
    """What a TF_Status says."""


def predict(version: Path, inputs: Mapping[str, Any], signature: str = "serving_default") -> dict[str, Array]:
    """Outputs of `signature` of the SavedModel at `version`, computed in a process without Python's TensorFlow.

    All calls share one process, which loads each SavedModel anew: starting it takes longer than asking it.
    """
    if not _SHARED or _SHARED[0].is_over:
        _SHARED[:] = [Process().__enter__()]
        atexit.register(_SHARED[0].kill)
    return _SHARED[0].ask(version, {signature: inputs})[signature]


class Process:
    """One process for many SavedModels, one after another."""

    def __enter__(self) -> Self:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate(timeout=120)

    def kill(self) -> None:
        """End it, whoever else holds its pipes."""
        self._process.kill()
        self._process.communicate()

    @property
    def is_over(self) -> bool:
        """Returns True if it has ended, as by a crash of TensorFlow."""
        return self._process.poll() is not None

    def ask(self, version: Path, calls: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Array]]:
        """Outputs by signature, each given its inputs, of the SavedModel at `version`, which is loaded once for them.

        Raises:
            TensorFlowError: it cannot be loaded, or a call fails.
        """
        package = Path(sys.modules["tensorflow"].__file__ or "").parent
        named = {name: {"inputs": dict(inputs), **_signature_names(version, name)} for name, inputs in calls.items()}
        tasks, replies = cast("IO[bytes]", self._process.stdin), cast("IO[bytes]", self._process.stdout)
        pickle.dump({"version": str(version), "package": str(package), "calls": named}, tasks)
        tasks.flush()
        answer = pickle.load(replies)
        if isinstance(answer, str):
            raise TensorFlowError(answer)
        return cast("dict[str, dict[str, Array]]", answer)


def _signature_names(version: Path, signature: str) -> dict[str, dict[str, str]]:
    """Tensor names by input and output name, from the graph's own proto."""
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel.FromString((version / "saved_model.pb").read_bytes())
    (definition,) = [m.signature_def[signature] for m in saved.meta_graphs if signature in m.signature_def]
    return {
        "input_names": {name: info.name for name, info in definition.inputs.items()},
        "output_names": {name: info.name for name, info in definition.outputs.items()},
    }


_SHARED: list[Process] = []  # the process of `predict`, once there is one


class Output(ctypes.Structure):
    """TF_Output."""

    _fields_ = [("operation", ctypes.c_void_p), ("index", ctypes.c_int)]


def c_library(package: Path) -> ctypes.CDLL:
    """TensorFlow's C functions, of the wheel at `package`."""
    ctypes.CDLL(str(package / "libtensorflow_framework.so.2"))
    tf = ctypes.CDLL(str(package / "libtensorflow_cc.so.2"))
    pointers = ("TF_NewStatus", "TF_NewGraph", "TF_NewSessionOptions", "TF_LoadSessionFromSavedModel")
    for name in (*pointers, "TF_GraphOperationByName", "TF_AllocateTensor", "TF_TensorData", "TF_StringGetDataPointer"):
        getattr(tf, name).restype = ctypes.c_void_p
    tf.TF_TensorByteSize.restype = tf.TF_StringGetSize.restype = ctypes.c_size_t
    tf.TF_Dim.restype = ctypes.c_int64
    tf.TF_Message.restype = ctypes.c_char_p
    return tf


class Session:
    """A graph in a session of its own, and the few functions that loading and running it need."""

    def __init__(self, package: Path) -> None:
        self.tf = c_library(package)
        self.status = ctypes.c_void_p(self.tf.TF_NewStatus())
        self.graph = ctypes.c_void_p(self.tf.TF_NewGraph())

    def check(self) -> None:
        if self.tf.TF_GetCode(self.status):
            raise TensorFlowError(self.tf.TF_Message(self.status).decode())

    def load(self, version: str) -> None:
        options = ctypes.c_void_p(self.tf.TF_NewSessionOptions())
        tags = (ctypes.c_char_p * 1)(b"serve")
        session = self.tf.TF_LoadSessionFromSavedModel(
            options, None, version.encode(), tags, 1, self.graph, None, self.status
        )
        self.check()
        self.session = ctypes.c_void_p(session)

    def close(self) -> None:
        """Give its memory back."""
        self.tf.TF_CloseSession(self.session, self.status)
        self.tf.TF_DeleteSession(self.session, self.status)
        self.tf.TF_DeleteGraph(self.graph)

    def run(self, feeds: Mapping[str, Any], fetches: Sequence[str]) -> list[Array]:
        """The values of the tensors `fetches`, given those of the tensors `feeds`."""
        given = (Output * len(feeds))(*map(self.output, feeds))
        values = (ctypes.c_void_p * len(feeds))(*(self.tensor(value).value for value in feeds.values()))
        wanted = (Output * len(fetches))(*map(self.output, fetches))
        results = (ctypes.c_void_p * len(fetches))()
        self.tf.TF_SessionRun(
            self.session, None, given, values, len(feeds), wanted, results, len(fetches), None, 0, None, self.status
        )
        self.check()
        return [self.array(ctypes.c_void_p(result)) for result in results]

    def output(self, name: str) -> Output:
        operation, _, index = name.partition(":")
        found = self.tf.TF_GraphOperationByName(self.graph, operation.encode())
        return Output(found, int(index or 0))

    def tensor(self, value: Any) -> ctypes.c_void_p:
        if not isinstance(value, np.ndarray) or value.dtype == object:
            return self._strings(np.array(value, object))
        value = np.ascontiguousarray(value)
        code = next(code for code, dtype in _CODES.items() if dtype == value.dtype)
        dims = (ctypes.c_int64 * value.ndim)(*value.shape)
        tensor = ctypes.c_void_p(self.tf.TF_AllocateTensor(code, dims, value.ndim, ctypes.c_size_t(value.nbytes)))
        if value.nbytes:
            ctypes.memmove(self.tf.TF_TensorData(tensor), value.ctypes.data, value.nbytes)
        return tensor

    def _strings(self, values: Array) -> ctypes.c_void_p:
        dims = (ctypes.c_int64 * values.ndim)(*values.shape)
        tensor = ctypes.c_void_p(
            self.tf.TF_AllocateTensor(_STRING, dims, values.ndim, ctypes.c_size_t(_STRING_SIZE * values.size))
        )
        start = self.tf.TF_TensorData(tensor)
        for index, value in enumerate(values.ravel().tolist()):
            place = ctypes.c_void_p(start + _STRING_SIZE * index)
            self.tf.TF_StringInit(place)
            self.tf.TF_StringCopy(place, value, ctypes.c_size_t(len(value)))
        return tensor

    def array(self, tensor: ctypes.c_void_p) -> Array:
        shape = [self.tf.TF_Dim(tensor, axis) for axis in range(self.tf.TF_NumDims(tensor))]
        start = self.tf.TF_TensorData(tensor)
        if self.tf.TF_TensorType(tensor) == _STRING:
            places = [ctypes.c_void_p(start + _STRING_SIZE * index) for index in range(math.prod(shape))]
            read = self.tf.TF_StringGetDataPointer, self.tf.TF_StringGetSize
            strings = [ctypes.string_at(read[0](place), read[1](place)) for place in places]
            return np.array(strings, object).reshape(shape)
        data = ctypes.string_at(start, self.tf.TF_TensorByteSize(tensor))
        dtype = _CODES[int(self.tf.TF_TensorType(tensor))]
        return np.frombuffer(data, dtype).reshape(shape)


def _run(request: dict[str, Any]) -> dict[str, dict[str, Array]]:
    session = Session(Path(request["package"]))
    session.load(request["version"])
    try:
        return {name: _call(session, **call) for name, call in request["calls"].items()}
    finally:
        session.close()


def _call(
    session: Session, inputs: Mapping[str, Any], input_names: Mapping[str, str], output_names: Mapping[str, str]
) -> dict[str, Array]:
    feeds = {input_names[name]: value for name, value in inputs.items()}
    return dict(zip(output_names, session.run(feeds, list(output_names.values())), strict=True))


def _requests() -> Iterator[dict[str, Any]]:
    with contextlib.suppress(EOFError):
        while True:
            yield pickle.load(sys.stdin.buffer)


def _serve() -> None:
    for request in _requests():
        try:
            answer: object = _run(request)
        except TensorFlowError as error:
            answer = str(error)[-500:]
        assert "tensorflow" not in sys.modules, json.dumps(sorted(sys.modules))
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
