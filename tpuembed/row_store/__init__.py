"""Rows of exports in Redis, Redis Cluster or Valkey: their keys, the records about them, and the client.

The exporter writes them, and the server reads them. `import tpuembed.row_store` does not import redis.

- `keys.py` has the key of each row.
- `commands.py` encodes commands about many keys.
- `client.py` connects, routes commands to the nodes of a cluster, and retries them.
- `records.py` has what is published: versions, their arrays, and the current version.
"""

from tpuembed.row_store.client import RowStore, connect, masked, password_of
from tpuembed.row_store.keys import ArrayKeys, check_model
from tpuembed.row_store.records import ArrayRecord, PublishedModel, VersionRecord

__all__ = [
    "ArrayKeys",
    "ArrayRecord",
    "PublishedModel",
    "RowStore",
    "VersionRecord",
    "check_model",
    "connect",
    "masked",
    "password_of",
]
