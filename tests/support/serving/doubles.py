"""Signatures and servables that need no TensorFlow."""

import copy
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes  # noqa: F401 - gives numpy the dtype bfloat16
import numpy as np

from tpuembed.manifest import MANIFEST_PATH, FileEntry, FromActivations, Manifest, Packing, StackEntry, TableEntry
from tpuembed_serving.core.servable import Array, Merging, Servable, Signature, TensorInfo

NUMPY = {"float": "float32", "double": "float64", "string": "object", "half": "float16"}


def tensor_infos(dtypes: Mapping[str, str]) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(alias, f"{alias}:0", dtype, np.dtype(NUMPY.get(dtype, dtype)))
        for alias, dtype in sorted(dtypes.items())
    )


def signature(inputs: Mapping[str, str], outputs: Mapping[str, str] | None = None, name: str = "f") -> Signature:
    """A signature of these dtypes, as TensorFlow's C++ names them, by alias."""
    return Signature(name, tensor_infos(inputs), tensor_infos(outputs or {}))


class DoublingServable:
    """`serving_default`: y = 2 x, both int64; `run_hook` is called inside every run."""

    def __init__(self, run_hook: Callable[[], None] = lambda: None, factor: int = 2) -> None:
        self.signatures: Mapping[str, Signature] = {
            "serving_default": signature({"x": "int64"}, {"y": "int64"}, "serving_default"),
            "no_inputs": signature({}, {"y": "int64"}, "no_inputs"),
        }
        self.signature_defs: Mapping[str, Any] = {"serving_default": {"method_name": "predict"}}
        self.closed = threading.Event()
        self._run_hook = run_hook
        self._factor = factor

    def run(self, signature: Signature, inputs: Sequence[Array]) -> list[Array]:
        assert not self.closed.is_set(), "a closed servable was run"
        self._run_hook()
        assert not self.closed.is_set(), "a servable was closed while it ran"
        return [inputs[0] * self._factor]

    def merging(self, signature: Signature) -> Merging | None:
        return None

    def knows_merging(self, signature: Signature) -> bool:
        return True

    def close(self) -> None:
        self.closed.set()


OPEN_INFERENCE = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "INT8": "int8",
    "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "half", "FP32": "float", "FP64": "double",
    "BF16": "bfloat16", "BYTES": "string",
}  # fmt: skip
"""The datatypes of the Open Inference Protocol, and TensorFlow's names for them."""


class EchoServable(DoublingServable):
    """A signature of each of these datatypes returns its input `x` as `y`; `serving_default` returns `ids` and `words`."""

    def __init__(self, run_hook: Callable[[], None] = lambda: None) -> None:
        super().__init__(run_hook)
        both = {"ids": "int64", "words": "string"}
        found = {"serving_default": signature(both, both, "serving_default")}
        found |= {name: signature({"x": dtype}, {"y": dtype}, name) for name, dtype in OPEN_INFERENCE.items()}
        self.signatures = found | {"complex": signature({"x": "complex64"}, {"y": "complex64"}, "complex")}
        shape = {"dim": [{"size": "-1", "name": ""}, {"size": "2", "name": ""}], "unknown_rank": False}
        tensors = {"ids": {"tensor_shape": shape}, "words": {"tensor_shape": {"dim": [], "unknown_rank": True}}}
        self.signature_defs = {"serving_default": {"inputs": tensors, "outputs": tensors}}

    def run(self, signature: Signature, inputs: Sequence[Array]) -> list[Array]:
        self._run_hook()
        return list(inputs)


def make_version(base_path: Path, name: str | int) -> Path:
    """A version folder that holds what a look at it needs."""
    path = base_path / str(name)
    path.mkdir(parents=True)
    (path / "saved_model.pb").write_bytes(b"graph")
    return path


class FakeLoader:
    """Loads folders into doubles, and remembers them; folders whose names are in `broken` raise.

    Attributes:
        during: called in each load.
        run_hook: called in each run of the doubles.
        halves: what failed loads had made, weakly.
    """

    def __init__(self) -> None:
        self.loaded: dict[str, DoublingServable] = {}
        self.calls: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.during: Callable[[], None] = lambda: None
        self.run_hook: Callable[[], None] = lambda: None
        self.halves: list[weakref.ref[DoublingServable]] = []

    def __call__(self, path: Path) -> Servable:
        self.calls.append(path.name)
        self.during()
        made = DoublingServable(lambda: self.run_hook())
        if path.name in self.broken:
            self.halves.append(weakref.ref(made))
            raise copy.copy(self.broken[path.name])  # the one in `broken` would keep its frames
        self.loaded[path.name] = made
        return made


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Until `condition` holds, which something else brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s"
        time.sleep(0.005)


def export_files(token: int, scratch: Path, table: str = "variables/variables.data-00000-of-00001") -> dict[str, bytes]:
    """Files of an export, all of which tell `token`; `table`, the larger one, is equal for tokens of one parity."""
    rows = 50
    shared = np.full((rows, 4), token % 2, np.float32).tobytes()
    files = {
        "saved_model.pb": b"graph %d" % token,
        "variables/variables.index": b"index %d" % token,
        table: shared,
        "assets/token": b"%d" % token,
    }
    stack = StackEntry(
        name="s", key="s", rows=rows, dim=4, storage="float32", file=table, offset=0, size=len(shared),
        crc32c=google_crc32c.value(shared),
    )  # fmt: skip
    entries = {name: FileEntry(size=len(data), crc32c=google_crc32c.value(data)) for name, data in files.items()}
    Manifest(
        packing=Packing(left_out="none"),
        from_activations=FromActivations(left_out="none"),
        tool_version="0",
        source={},
        layout="variables",
        tables=(TableEntry(name="t", rows=rows, dim=4, dtype="float32", stack="s", row_offset=0),),
        stacks=(stack,),
        signatures={},
        files={name: entry for name, entry in entries.items() if name != table},
    ).write(scratch)
    return {str(MANIFEST_PATH): (scratch / MANIFEST_PATH).read_bytes(), **files}
