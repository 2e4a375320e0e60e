"""TensorFlow Serving's gRPC API.

It turns messages into calls of `core`, and results into messages.
"""
