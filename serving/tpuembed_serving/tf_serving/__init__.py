"""Forwards requests to a TensorFlow Serving server, and prints how to start one."""
