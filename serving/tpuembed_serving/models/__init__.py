"""Finds versions of models on disk, loads, labels, replaces and unloads them.

A models.config says which.
"""
