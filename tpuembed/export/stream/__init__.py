"""Copies rows from a checkpoint into the files of a version, shard by shard, in bounded memory.

Engines run the shards.
"""
