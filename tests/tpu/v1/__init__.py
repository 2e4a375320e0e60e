"""The V1 accelerator (TPU v2 to v4) without one: its configuration, and what a step hands to it and takes from it.

Its engine is closed, so nothing here runs it. What is checked is that each field of the configuration says what
TensorFlow's protos document it to mean, and that the ops of a step get the arrays that their documentation asks for.
"""
