"""The parts of a request that HTTP and gRPC share: status codes, signatures, limits, API keys and deadlines."""
