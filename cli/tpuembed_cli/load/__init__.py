"""Measures servers under load: the requests, the clients, the server's processes."""
