"""What tables and a sample of their ids need on SparseCores: limits of ids, padding, memory. Nothing runs on a TPU.

`estimate` is a plan of three parts: `sample` reads ids, `counting` counts them as TensorFlow's host ops do, `report` puts
them beside the layout that TensorFlow would choose and the limits that the tables have.
"""

from tpuembed.sizing.report import SizingReport, StackSize, TableSize, Topology, estimate, load_features
from tpuembed.sizing.sample import FeatureIds, read_sample

__all__ = [
    "FeatureIds",
    "SizingReport",
    "StackSize",
    "TableSize",
    "Topology",
    "estimate",
    "load_features",
    "read_sample",
]
