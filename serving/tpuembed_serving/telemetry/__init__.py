"""What operators see of requests: metrics, an access log and traces.

Each is off unless the settings ask for it.
"""
