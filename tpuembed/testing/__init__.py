"""Simulated TPUs: runs TensorFlow's SparseCore path on the CPU, to test models and their checkpoints.

    with tpuembed.testing.simulated_tpu(replicas=2) as strategy:
        with strategy.scope():
            layer = tpuembed.TPUEmbedding(features, optimizer="adagrad", batch_size=16)
        strategy.run(step, args=(batches,))

Everything but the TPU's own programs is real: the stacking, padding, mod-sharding and rotation of tables, the
variables, the order of a step, the checkpoint. It does not show a TPU's speed, memory or rounding.
"""

from tpuembed.testing.simulation import SimulatedTPUStrategy, simulated_tpu

__all__ = ["SimulatedTPUStrategy", "simulated_tpu"]
