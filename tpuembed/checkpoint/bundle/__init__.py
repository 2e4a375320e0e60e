"""Reads tables from TensorFlow's tensor bundles, without TensorFlow.

They are of this layer, TensorFlow's classes, Keras, and plain variables.
"""
