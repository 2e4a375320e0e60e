"""Forwards requests to TensorFlow Serving."""
