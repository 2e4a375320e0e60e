"""The numbers of the SparseCore path: TensorFlow's own host kernels, the simulator, and the rules that a TPU compiles."""
