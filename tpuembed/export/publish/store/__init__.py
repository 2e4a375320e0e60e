"""Writes versions into an object store, which cannot rename: data files are uploads that become visible when they are complete.

`saved_model.pb` is written last, and only if no other process has written it. Until then a version is
`MODEL_DIR/.staging-<version>/record` and invisible uploads.
"""
