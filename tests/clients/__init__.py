"""Real clients of the Open Inference Protocol, in an environment of their own: they need another protobuf than TensorFlow."""
