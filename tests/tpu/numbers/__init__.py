"""The numbers of the SparseCore path: TensorFlow's own host kernels, the simulator, and the rules that a TPU compiles.

Broken variants, and which check catches each, for whoever lists them:

    from tests.tpu.numbers.broken import BROKEN           # of the layer and the simulator, found with TensorFlow's kernels
    from tests.tpu.numbers.broken_rules import BROKEN     # of the optimizers' rules, found with the lowered computations
    from tests.tpu.v1.broken import BROKEN                # of the V1 path

They are lists of `tests.tpu.numbers.variant.Variant`, whose `name`, `breaks` and `check` are text.
"""
