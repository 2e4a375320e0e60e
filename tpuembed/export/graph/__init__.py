"""Builds the SavedModel of an export: signatures over tables without data, lookups, and the dense weights of whole
models.
"""
