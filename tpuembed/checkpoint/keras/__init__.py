"""Weights that Keras 3 saves: `.weights.h5`, sharded `.weights.json`, `.keras`; tables of keras-rs and of tpuembed's
layer.

    reader        the checkpoint
    discovery     finds the tables: tables, model_config (the configs in `.keras` files), slots (which Keras only
    numbers)
    weights       files as groups of variables: archive (`.keras`), shards (`.weights.json`)
    matrices      reads rows by range, from contiguous bytes or from chunks
    h5_listing    the content of an HDF5 file, from h5_lister, a separate process, because HDF5 hangs on some damaged
    files
"""

from tpuembed.checkpoint.keras.reader import KerasCheckpoint

__all__ = ["KerasCheckpoint"]
