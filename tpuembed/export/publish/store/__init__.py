"""Versions in an object store, which cannot rename: data files are uploads in parts, seen when they are completed.

parts     which shards make a part: the store's limits
part      what a worker does: shards into a temporary file, which is PUT to a signed URL
record    who writes a version and what is finished, in one object, which is also what reserves the version
claim     how a version is reserved, or what a killed export left is taken over
tables    data files as uploads
staging   a version in the making, and how it becomes visible: saved_model.pb is written last, if no other is there

Objects of a version in the making: `MODEL_DIR/.staging-<version>/record`, and uploads that nobody sees.
"""
