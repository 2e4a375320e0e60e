"""Weights that Keras 3 saves: `.weights.h5`, sharded `.weights.json`, `.keras`; tables of keras-rs and of tpuembed's layer.

reader        the checkpoint
discovery     which tables there are: tables, model_config (what `.keras` files say), slots (what Keras only numbers)
weights       files as groups of variables: archive (`.keras`), shards (`.weights.json`)
matrices      rows by range, from bytes side by side or from chunks
h5_listing    what an HDF5 file holds, asked of h5_lister, a process of its own, as HDF5 hangs on some damaged files
"""

from tpuembed.checkpoint.keras.reader import KerasCheckpoint

__all__ = ["KerasCheckpoint"]
