"""Reads the checkpoints that Orbax writes for JAX, with tables stored row by row or stacked on SparseCores.

All tables are opened and checked before a row is read, and chunks are read in bounded memory.
"""

from tpuembed.checkpoint.orbax.reader import OrbaxCheckpoint

__all__ = ["OrbaxCheckpoint"]
