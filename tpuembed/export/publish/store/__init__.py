"""Writes versions into an object store, which cannot rename: data files are uploads that become visible when they are complete.

`saved_model.pb` is written last, and only if no other process has written it. Until the commit, a version is invisible uploads.
"""
