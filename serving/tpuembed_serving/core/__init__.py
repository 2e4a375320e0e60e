"""Everything about a request that no transport knows: status codes, signatures, limits, keys and deadlines.

HTTP and gRPC are adapters over it.
"""
