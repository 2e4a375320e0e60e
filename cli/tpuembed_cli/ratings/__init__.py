"""The demo's parts: ratings, the model of the published ranking tutorial, and the pipeline from training to
predictions.
"""
