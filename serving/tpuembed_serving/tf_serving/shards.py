"""All shards of a shards.yaml as one server: how each is called, with its certificates and keys."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tpuembed_serving.core.shards_file import Shard, ShardsFile
from tpuembed_serving.tensorflow.import_lock import IMPORTING_TENSORFLOW
from tpuembed_serving.tf_serving.sharded import Route, ShardedPredictions, ShardedStates

if TYPE_CHECKING:
    from tpuembed_serving.grpc.remote_calls import Access

__all__ = ["Shards"]

_REMEDY: Final = "Is it the gRPC port? Do the shards use TLS (tls in shards.yaml)?"
_CONNECTIONS: Final = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
"""A replica that has a call and does not even answer pings gets no more calls: after 15 seconds, or 5 if gRPC has just sent one
itself. One that comes back gets calls after two seconds.
"""


class Shards:
    """All shards of a file as one server.

    Attributes:
        name: what messages call it.
        missing: the names of the shards that the last poll did not reach.
    """

    is_one = False

    def __init__(self, file: ShardsFile) -> None:
        """Open nothing yet."""
        self._file, self._routes = file, dict[int, list[Route]]()
        self.name = f"the shards of {file.path}"
        self.missing = list[str]()
        self._doubted = set[int]()
        self._secrets = file.secrets()
        self._states: ShardedStates | None = None
        self._predictions: ShardedPredictions | None = None

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """Return the files of certificates and keys."""
        return self._file.secret_files

    def reload(self) -> str:
        """Read the certificates and the key again, for new connections to the shards. Return the line to log.

        Raises:
            ConfigError: a file cannot be read, or they do not fit. Those of before stay in use.
        """
        self._secrets = self._file.secrets()
        if self._states is not None:
            self._states.clients.renew(self._accesses(checks_health=False))
        if self._predictions is not None:
            self._predictions.clients.renew(self._accesses(checks_health=True))
        return f"shards {self._file.path}: certificates and key for the shards: read again"

    def _accesses(self, *, checks_health: bool) -> "list[Access]":
        return [self._access(shard, checks_health=checks_health) for shard in self._file.shards]

    def _access(self, shard: Shard, *, checks_health: bool) -> "Access":
        """Return how a shard is called: replicas in turn, and with `checks_health` only those whose model is available."""
        import grpc

        from tpuembed_serving.grpc.remote_calls import Access

        balancing: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
        if checks_health:
            balancing["healthCheckConfig"] = {"serviceName": shard.name}
        options: list[tuple[str, Any]] = [("grpc.service_config", json.dumps(balancing)), *_CONNECTIONS]
        credentials = None
        tls, own = self._file.tls, self._secrets
        if tls is not None:
            credentials = grpc.ssl_channel_credentials(own.ca, own.key, own.certificate)
            if tls.server_name is not None:
                options.append(("grpc.ssl_target_name_override", tls.server_name))
        return Access(
            options, credentials, () if own.api_key is None else (("x-api-key", own.api_key),), "the server", _REMEDY
        )

    def states(self) -> ShardedStates:
        """Connect for queries of versions."""
        with IMPORTING_TENSORFLOW:
            accesses = self._accesses(checks_health=False)
        self._states = ShardedStates(self._file, accesses, self._routes, self.missing, self._doubted)
        return self._states

    def predictions(self) -> ShardedPredictions:
        """Connect for requests, on the event loop that is running."""
        accesses = self._accesses(checks_health=True)
        self._predictions = ShardedPredictions(self._file, accesses, self._routes, self._doubted)
        return self._predictions
