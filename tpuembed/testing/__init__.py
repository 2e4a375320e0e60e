"""TPUs that are not there: TensorFlow's SparseCore path run on the CPU, to test models and their checkpoints.

    with tpuembed.testing.simulated_tpu(replicas=2) as strategy:
        with strategy.scope():
            layer = tpuembed.TPUEmbedding(features, optimizer="adagrad", batch_size=16)
        strategy.run(step, args=(batches,))

Everything but the TPU's own programs is real: how tables are stacked, padded, dealt out and rotated, the variables, the
order of a step, the checkpoint. It says nothing of a TPU's speed, memory or rounding.
"""

from tpuembed.testing.simulation import SimulatedTPUStrategy, simulated_tpu

__all__ = ["SimulatedTPUStrategy", "simulated_tpu"]
