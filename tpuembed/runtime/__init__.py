"""Prepares the process: checks the TensorFlow installation, finds the TPU, and configures how layers are built."""
