"""Loads SavedModels with TensorFlow and runs their signatures.

No other room of the server loads a model.
"""
