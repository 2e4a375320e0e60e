"""Forwards requests to TensorFlow Serving, or to the shards of a model. Prints how to start TensorFlow Serving."""
