"""Rows of exports in Redis, Redis Cluster or Valkey: their keys, and the client.

`tpuembed publish` writes them, and the server reads them. `import tpuembed.row_store` does not import redis.
"""

from tpuembed.row_store.client import PASSWORD_VARIABLE, PUBLISHER, RowStore, check_url, connect
from tpuembed.row_store.keys import RowKeys, check_model, hash_of

__all__ = ["PASSWORD_VARIABLE", "PUBLISHER", "RowKeys", "RowStore", "check_model", "check_url", "connect", "hash_of"]
