"""Observes requests for operators: metrics, an access log and traces.

Each is off by default.
"""
