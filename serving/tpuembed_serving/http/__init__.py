"""TensorFlow Serving's REST API, and the server's own pages: converts HTTP to calls of `core`, and results to HTTP."""
