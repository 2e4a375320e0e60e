"""Reads the weights that Keras 3 saves: `.weights.h5`, sharded `.weights.json` and `.keras`, with tables of keras-rs and tpuembed.

Groups and arrays come from h5py, as Keras itself reads them.
"""

from tpuembed.checkpoint.keras.reader import KerasCheckpoint

__all__ = ["KerasCheckpoint"]
