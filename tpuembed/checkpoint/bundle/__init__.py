"""Reads tables from TensorFlow's tensor bundles, without TensorFlow.

The tables are those of tpuembed's layer, TensorFlow's classes, Keras, and plain variables.
"""
