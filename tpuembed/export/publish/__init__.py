"""Assembles a version and publishes it atomically, in a folder or in an object store."""
