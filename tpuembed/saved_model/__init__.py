"""SavedModels of tables without TensorFlow: code that the exporter, the server and the command line share.

mapped_paths    the paths that a graph maps its tables from, found and rewritten in the bytes of saved_model.pb
table_files     sizes and checksums of an export's data files
relocate        `tpuembed relocate`
"""

from tpuembed.saved_model.mapped_paths import MappedTensor, graph_crc32c, mapped_from, mapped_tensors, replace_paths
from tpuembed.saved_model.relocate import Relocation, check_root, relocate_export, replace_file
from tpuembed.saved_model.table_files import GRAPH_FILE, check_sizes, file_crc32c, size_faults

__all__ = [
    "GRAPH_FILE",
    "MappedTensor",
    "Relocation",
    "check_root",
    "check_sizes",
    "file_crc32c",
    "graph_crc32c",
    "mapped_from",
    "mapped_tensors",
    "relocate_export",
    "replace_file",
    "replace_paths",
    "size_faults",
]
