"""Loads SavedModels with TensorFlow and runs their signatures."""
