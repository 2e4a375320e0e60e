"""Simulated TPUs: runs TensorFlow's SparseCore path on the CPU, to test layers and their checkpoints.

Everything but the TPU's own programs is real: the stacking, padding, mod-sharding and rotation of tables, the
variables, the order of a step, the checkpoint. It does not show a TPU's speed, memory or rounding.
"""
