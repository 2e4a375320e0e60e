"""Finds versions of models on disk, loads, labels, replaces and unloads them."""
