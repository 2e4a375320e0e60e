"""Embedding accelerators: SparseCores and the first generation, through the objects that TensorFlow drives them by."""
