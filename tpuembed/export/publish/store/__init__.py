"""Versions in an object store. A store cannot rename, so data files are multipart uploads, visible once completed.

    parts          groups shards into parts, within the store's limits
    part           writes the shards of a part to a temporary file and uploads it to a signed URL, in a worker
    record         the object that names the version's owner and its finished shards, and reserves the version
    version_lease  reserves a version, or takes over the one of an interrupted export
    heartbeat      renews the record
    tables         data files as uploads
    staging        writes a version and publishes it: saved_model.pb last, and only if that object does not exist yet

A version being written consists of `MODEL_DIR/.staging-<version>/record` and of uploads, which are invisible.
"""
