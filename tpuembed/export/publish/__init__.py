"""Puts a version together and makes it visible at once, in a folder or in an object store."""
