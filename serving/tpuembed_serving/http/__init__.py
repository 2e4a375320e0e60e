"""TensorFlow Serving's REST API, and the pages of this server.

Bytes of HTTP become calls of `core`, and results become bytes.
"""
