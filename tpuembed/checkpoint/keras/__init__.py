"""Reads the weights that Keras 3 saves: `.weights.h5`, sharded `.weights.json` and `.keras`, with tables of keras-rs and tpuembed.

HDF5 hangs on some damaged files. So a separate process, `h5_lister`, lists the content of a file.
"""

from tpuembed.checkpoint.keras.reader import KerasCheckpoint

__all__ = ["KerasCheckpoint"]
