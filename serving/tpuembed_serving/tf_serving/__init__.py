"""Forwards requests to a TensorFlow Serving server, behind the same APIs.

It also prints how to start that server.
"""
