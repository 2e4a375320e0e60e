"""Queues requests, batches those that may be batched, and runs the batches on a few threads.

Each request gets the rows that it would get alone.
"""
