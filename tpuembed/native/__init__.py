"""Lookups and searches in C, over mapped files. `src/` has the sources."""
