"""Stage 3: libtpu, the TPU compiler, makes executables of the lowered programs. In jax's environment: its client needs no TPU.

What libtpu says of each is kept: memory, and how much of it runs on SparseCores.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.experimental import topologies

from tests.tpu import shims
from tests.tpu.cells import Cell
from tests.tpu.jobs import result_file, serve

__all__ = ["build"]

_KINDS = ("generated_code", "argument", "output", "alias", "temp")


def build(text: str, topology: str, replicas: int) -> dict[str, Any]:
    """What libtpu says of the executable that it makes of `text`; its error where it makes none."""
    for shim in (shims.no_annotations, shims.all_reduce):
        text = shim(text)
    devices = _devices(topology)[:replicas]
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = replicas, 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id] for device in devices]))
    with mlir.make_ir_context():
        module = ir.Module.parse(shims.replicas_of_module(text, replicas))
        module.operation.verify()
        executable = devices[0].client.compile(module, xla_client.DeviceList(devices), options)
    return _facts(executable)


@functools.cache
def _devices(topology: str) -> tuple[Any, ...]:
    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


def _facts(executable: Any) -> dict[str, Any]:
    optimized = "\n".join(module.to_string() for module in executable.hlo_modules())
    memory = executable.get_compiled_memory_stats()
    return {
        "memory": {
            **{kind: getattr(memory, f"{kind}_size_in_bytes") for kind in _KINDS},
            "peak": memory.peak_memory_in_bytes,
        },
        "sparse_core_starts": len(re.findall(r'async_execution_thread="sparsecore\w*"', optimized)),
        "custom_calls": sorted(set(re.findall(r'custom_call_target="([^"]+)"', optimized))),
    }


def compiled(cell: Cell, folder: Path) -> dict[str, Any]:
    """Compile every program of `cell`."""
    programs = json.loads(result_file(folder, cell, "lower").read_text())["programs"]
    hardware = cell.hardware
    texts = {program: (folder / f"{cell.name}.{program}.mlir").read_text() for program in programs}
    return {"programs": {name: build(text, hardware.topology, cell.replicas) for name, text in texts.items()}}


if __name__ == "__main__":
    serve(compiled)
