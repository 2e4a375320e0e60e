"""A training step of the layer for every rule: traced, then lowered by TensorFlow's TPU kernels. In tensorflow-tpu's environment.

python -m tests.tpu.numbers.lowering trace FOLDER      # without libtpu
python -m tests.tpu.numbers.lowering lower FOLDER      # with it, in another process
"""

import sys
from pathlib import Path
from unittest import mock

from tests.tpu.cells import Cell
from tests.tpu.numbers.hyper_parameters import RULES, Rule

__all__ = ["cell_of"]


def cell_of(rule: Rule) -> Cell:
    """The step that is lowered: one table of 8 columns on one chip."""
    return Cell("v5p", "sparsecore", rule.optimizer, tables="one", combiner="sum")


def _trace(folder: Path) -> None:
    import tpuembed.config
    from tests.tpu import trace

    for name, rule in RULES.items():
        (folder / name).mkdir()
        spec = getattr(tpuembed.config, rule.optimizer)(learning_rate=0.5, **rule.given)
        chosen = mock.patch.object(
            tpuembed.config, rule.optimizer, return_value=spec
        )  # as `trace` makes it by its name
        with chosen:
            text = trace.traced(cell_of(rule))
        (folder / name / f"{cell_of(rule).name}.tf.mlir").write_text(text)


def _lower(folder: Path) -> None:
    from tests.tpu import lower

    for name, rule in RULES.items():
        lower.lower(cell_of(rule), folder / name)


if __name__ == "__main__":
    {"trace": _trace, "lower": _lower}[sys.argv[1]](Path(sys.argv[2]))
