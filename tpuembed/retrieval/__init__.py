"""Retrieval: the best candidates for a query, found in an index that is exported with the query's model.

`tpuembed.export_retrieval` writes the index and its graph: `candidates` collects the vectors, `partitions` divides them, `search`
finds the best ones with stock operations of TensorFlow. Importing this module imports no TensorFlow.
"""
