"""The limits, padding and memory of tables on SparseCores, estimated from a sample of their ids. Nothing runs on a TPU.

Ids are counted as TensorFlow's host ops do, and compared with the layout that TensorFlow would choose and the tables' limits.
"""

from tpuembed.sizing.report import FeatureIds, SizingReport, StackSize, TableSize, Topology, estimate, read_sample

__all__ = ["FeatureIds", "SizingReport", "StackSize", "TableSize", "Topology", "estimate", "read_sample"]
