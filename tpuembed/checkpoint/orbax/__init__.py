"""Checkpoints that Orbax wrote for JAX.

location          from a user's path to the items of one step
metadata          the tree of an item
stack_specs       how tables are stacked on SparseCores, from the checkpoint (text_format) or from the user
discovery, stacks find the arrays that are tables and slots, stored row by row or in stacks
row_runs          finds a table's rows in a stored array
arrays            reads arrays, through TensorStore
chunk_memory, chunk_stream, chunk_streams, stored_values   bound the memory for chunks
tables            opens and checks all tables before a row is read
reader            the format
"""

from tpuembed.checkpoint.orbax.reader import OrbaxCheckpoint

__all__ = ["OrbaxCheckpoint"]
