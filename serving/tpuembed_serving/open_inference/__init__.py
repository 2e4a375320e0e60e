"""The Open Inference Protocol v2, as far as REST and gRPC share it: tensors, what a request asks, what a model is.

Source: specification/protocol of github.com/kserve/open-inference-protocol, and Triton's extension of binary tensors.
"""
