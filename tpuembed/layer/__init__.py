"""The Keras 3 layer, and what belongs to a live layer: its tables, their stamps and names, its files, restores into it."""

from tpuembed.layer.tpu_embedding import TPUEmbedding

__all__ = ["TPUEmbedding"]
