"""The table of operations: what each makes of rows. An operation that is not in it mixes rows."""

from tpuembed_serving.batching.row_proof import elementwise, lookups, reductions, shapes, slices, tensor_lists
from tpuembed_serving.batching.row_proof.rules import OUTPUTS, RULES, NodeCall

__all__ = ["OUTPUTS", "RULES", "NodeCall"]
_MODULES = (elementwise, lookups, reductions, shapes, slices, tensor_lists)
"""Each of them adds its rules to RULES when it is imported."""
