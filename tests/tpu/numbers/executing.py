"""The computations that update rows, out of lowered steps, run by XLA on the CPU. In jax's environment.

python -m tests.tpu.numbers.executing FOLDER

Reads FOLDER/inputs.npz: "<optimizer>/<argument>" -> float32 [cases, 8]; writes FOLDER/outputs.npz: "<rule>/<number>" -> float32
[cases, 8], 0 for the table, then the slots.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir

from tests.tpu.numbers.hyper_parameters import RULES, arguments
from tests.tpu.numbers.lowering import cell_of

__all__ = ["computation", "run"]

Array = np.ndarray[Any, Any]

_FUNCTION = re.compile(
    r"^  func\.func private @[\w.]+\(([^)]*)\) -> tuple<(.*?)> (?:attributes \{.*?\} )?\{\n(.*?)^  }\n", re.M | re.S
)
_TUPLE = re.compile(r"^ *(%\w+) = stablehlo\.tuple ([^{:]*?)(?: \{.*?\})? : tuple<(.*)>\n *return \1 : .*\n", re.M)


def computation(text: str) -> tuple[str, int]:
    """(a module whose main is the one function that updates rows, how many arguments it takes) of a lowered step."""
    [(parameters, results, body)] = _FUNCTION.findall(text)
    found = _TUPLE.search(body)
    assert found, body
    returned = f"{body[: found.start()]}return {found[2]} : {found[3]}\n"
    return (
        f"module @rule {{\nfunc.func public @main({parameters}) -> ({results}) {{\n{returned}}}\n}}\n",
        parameters.count("%arg"),
    )


def run(text: str, cases: Sequence[Sequence[Array]]) -> list[list[Array]]:
    """Results of the computation of a lowered step, for the arguments of every case."""
    module, count = computation(text)
    device = jax.devices("cpu")[0]
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        parsed.operation.verify()
        executable = device.client.compile_and_load(
            parsed, xla_client.DeviceList((device,)), xla_client.CompileOptions()
        )
    found = []
    for case in cases:
        assert len(case) == count, (len(case), count)
        results = executable.execute([jax.device_put(argument, device) for argument in case])
        found.append([np.asarray(result) for result in results])
    return found


def main(folder: Path) -> None:
    """Every rule."""
    outputs: dict[str, Array] = {}
    with np.load(folder / "inputs.npz") as inputs:
        for name, rule in RULES.items():
            text = (folder / name / f"{cell_of(rule).name}._func.mlir").read_text()
            arrays = [inputs[f"{rule.optimizer}/{argument}"] for argument in arguments(rule.optimizer)]
            cases = [[array[None, case] for array in arrays] for case in range(len(arrays[0]))]
            for number, of_cases in enumerate(zip(*run(text, cases), strict=True)):
                outputs[f"{name}/{number}"] = np.concatenate(of_cases)
    np.savez(folder / "outputs.npz", **outputs)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
