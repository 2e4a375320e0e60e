"""Prepares the process: which TensorFlow is installed, where the TPU is, and what Keras is to do while a layer is built."""
