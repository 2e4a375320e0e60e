"""TensorFlow Serving's gRPC API: converts messages to calls of `core`, and results to messages."""
