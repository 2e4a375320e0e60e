"""Lists, removes and publishes again the versions of a MODEL_DIR on a disk. Imports no TensorFlow.

A version's files may be hard links that it shares with other versions. So a removed version takes nothing from the others.
"""
