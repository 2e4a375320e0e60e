"""Stage 2: TensorFlow's bridge and its TPU kernels make StableHLO of a traced step. In tensorflow-tpu's environment, with libtpu.

The bridge takes the hosts' part out, runs the passes of embeddings and pipelining, and leaves one program or, pipelined, five.
"""

import re
from pathlib import Path
from typing import Any

from tensorflow.python import pywrap_mlir

from tests.tpu import shims
from tests.tpu.cells import Cell
from tests.tpu.jobs import serve

__all__ = ["BRIDGE", "KERNELS"]

BRIDGE = "tf-replicated-clustering-bridge-v2"
"""What TensorFlow runs before it compiles a step for TPUs."""
KERNELS = (
    "xla-legalize-tf{use-tf2xla-fallback=true device-type=XLA_TPU_JIT prefer-tf2xla=true},canonicalize,"
    "hlo-legalize-to-stablehlo"
)
"""Every op by its TPU kernel."""


def lower(cell: Cell, folder: Path) -> dict[str, Any]:
    """Write `cell`'s module after the bridge, and its programs."""
    text = (folder / f"{cell.name}.tf.mlir").read_text()
    bridged = pywrap_mlir.experimental_run_pass_pipeline(text, BRIDGE, False)
    (folder / f"{cell.name}.bridged.mlir").write_text(bridged)
    programs = re.findall(r'"tf_device\.cluster_func"\(.*?\) <\{func = @([\w.]+)\}>', bridged)
    for program in programs:
        module = shims.bounds_as_sizes(shims.one_program(bridged, program))
        lowered = pywrap_mlir.experimental_run_pass_pipeline(module, KERNELS, False)
        _check_lowered(lowered)
        (folder / f"{cell.name}.{program}.mlir").write_text(lowered)
    return {"programs": programs}


def _check_lowered(text: str) -> None:
    left = sorted(set(re.findall(r'"(tf[\w.]*)"\(', text)))
    if left:
        raise ValueError(f"ops without a TPU kernel: {', '.join(left)}")


if __name__ == "__main__":
    serve(lower)
