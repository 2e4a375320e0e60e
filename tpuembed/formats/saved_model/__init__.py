"""Reads and rewrites SavedModels of tables without TensorFlow, for the exporter, the server and the command line.

It finds the paths that a graph maps tables from, and the sizes and checksums of data files.
"""

from tpuembed.formats.saved_model.mapped_paths import (
    MappedTensor,
    mapped_folders,
    mapped_from,
    mapped_tensors,
    relative_graph,
    replace_paths,
    without_rows,
)
from tpuembed.formats.saved_model.version_files import (
    GRAPH_FILE,
    Relocation,
    check_root,
    check_sizes,
    file_crc32c,
    relocate_export,
    replace_file,
    size_faults,
)

__all__ = [
    "GRAPH_FILE",
    "MappedTensor",
    "Relocation",
    "check_root",
    "check_sizes",
    "file_crc32c",
    "mapped_folders",
    "mapped_from",
    "mapped_tensors",
    "relative_graph",
    "relocate_export",
    "replace_file",
    "replace_paths",
    "size_faults",
    "without_rows",
]
