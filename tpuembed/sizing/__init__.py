"""The limits, padding and memory of tables on SparseCores, estimated from a sample of their ids. Nothing runs on a TPU.

`counting` reads ids, and counts them as TensorFlow's host ops do. `report` compares the counts with the layout that TensorFlow
would choose and with the tables' limits.
"""

from tpuembed.sizing.counting import FeatureIds, Topology, read_sample
from tpuembed.sizing.report import SizingReport, StackSize, TableSize, estimate

__all__ = [
    "FeatureIds",
    "SizingReport",
    "StackSize",
    "TableSize",
    "Topology",
    "estimate",
    "read_sample",
]
