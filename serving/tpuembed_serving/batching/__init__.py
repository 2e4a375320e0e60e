"""Queues requests, decides which ones share a run, and runs them on a few threads.

Each request gets the rows that it would get alone.
"""
