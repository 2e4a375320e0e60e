"""Rows of exports in Redis, Redis Cluster or Valkey: their keys, and the client.

`tpuembed publish` writes them, and the server reads them. `import tpuembed.row_store` does not import redis.
"""

from tpuembed.row_store.client import PASSWORD_VARIABLE, RowStore, check_url, connect
from tpuembed.row_store.keys import RowKeys, check_model

__all__ = ["PASSWORD_VARIABLE", "RowKeys", "RowStore", "check_model", "check_url", "connect"]
