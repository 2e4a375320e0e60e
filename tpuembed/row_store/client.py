"""Connects to Redis, and runs commands about many rows: one round trip to each node, whatever the number of rows.

redis-py connects, authenticates, finds the nodes of a cluster and parses replies. This module sends commands that it has
encoded, and collects the replies: redis-py's own MGET encodes each key by itself, and takes keys of one slot alone.
"""

import contextlib
import dataclasses
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError, MissingExtraError, RowStoreError, reason
from tpuembed.row_store.commands import Calls, KeySpan
from tpuembed.row_store.keys import TAGS, buckets_of

__all__ = ["PASSWORD_VARIABLE", "Keys", "RowStore", "check_url", "connect", "masked", "password_of"]

_Bytes = npt.NDArray[np.uint8]
Reply = bytes | None | Any

PASSWORD_VARIABLE: Final = "TPUEMBED_REDIS_PASSWORD"
_TLS_OPTIONS: Final = (
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_keyfile",
)
"""The options of a URL that redis-py takes for TLS."""
_CONNECT_SECONDS: Final = 2.0
_SOCKET_SECONDS: Final = 5.0
_READ_BYTES: Final = 256 << 10
_FIRST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 1.0
_REFUSED_SECONDS: Final = 1.0
"""How long a server, or all nodes of a cluster, may refuse connections before commands fail."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys [n, length] of some rows, and the rows' buckets [n]."""

    keys: _Bytes
    buckets: _Bytes

    @classmethod
    def of(cls, parts: Sequence[tuple[Any, npt.NDArray[np.int64]]]) -> "Keys":
        """Return the keys of (ArrayKeys, rows) after each other."""
        keys = [array.of(rows) for array, rows in parts]
        return cls(np.concatenate(keys), np.concatenate([buckets_of(rows) for _, rows in parts]))


def masked(url: str) -> str:
    """Return `url` for a message: without a password, and without the options after "?"."""
    parts = _split(url)
    if not parts.netloc:
        return parts.path.rpartition("@")[2]
    host = parts.netloc.rpartition("@")[2]
    user = f"{parts.username}@" if parts.username else ""
    return f"{parts.scheme}://{user}{host}{parts.path}"


def password_of(path: Path | None) -> str | None:
    """Return the password in the file at `path`, or that of the environment; None if there is neither.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if path is None:
        return os.environ.get(PASSWORD_VARIABLE) or None
    try:
        text = path.read_text(encoding="utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"redis_password_file {path}: cannot be read: {reason(error)}.") from None
    if not text:
        raise ConfigError(f"redis_password_file {path}: is empty. Write the password into it.")
    return text


class _PasswordFile:
    """Logs in with the password in a file, which is read again for each connection. It is a CredentialProvider of redis-py."""

    def __init__(self, path: Path, user: str | None) -> None:
        self._path, self._user, self._password = path, user, password_of(path)

    def get_credentials(self) -> tuple[str | None, ...]:
        """Return the password, after the user if there is one. The last password stays while the file cannot be read."""
        with contextlib.suppress(ConfigError):
            self._password = password_of(self._path)
        return (self._user, self._password) if self._user else (self._password,)


def connect(url: str, password: str | None = None, *, password_file: Path | None = None) -> "RowStore":
    """Connect to the Redis at `url`, redis://[USER@]HOST:PORT[/DB], or rediss:// for TLS. A cluster is recognised.

    Args:
        url: without a password.
        password: None logs in without one.
        password_file: has the password, in the place of `password`. It is read again for each connection.

    Raises:
        ConfigError: `url` is no such URL, or has a password.
        RowStoreError: there is no Redis, or it refuses the password.
        MissingExtraError: redis-py is not installed.
    """
    check_url(url)
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise MissingExtraError("redis://", "redis", "redis") from None
    options: dict[str, Any] = {
        "socket_timeout": _SOCKET_SECONDS,
        "socket_connect_timeout": _CONNECT_SECONDS,
        "socket_read_size": _READ_BYTES,
        "retry": Retry(NoBackoff(), 0),  # RowStore retries
    }
    address = url
    if password_file is None:
        options["password"] = password
    else:
        parts = _split(url)
        options["credential_provider"] = _PasswordFile(password_file, unquote(parts.username or "") or None)
        address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    client: Any = None
    try:
        client = redis.Redis.from_url(address, **options)
        if not client.info("cluster")["cluster_enabled"]:
            return RowStore(client, url, is_cluster=False)
        client.close()
        return RowStore(redis.RedisCluster.from_url(address, **options), url, is_cluster=True)
    except (redis.RedisError, OSError, ValueError) as error:
        if client is not None:
            client.close()
        raise _refusal(url, error) from None


class RowStore:
    """A connection to Redis, for any number of threads.

    Attributes:
        url: without a password, for messages.
        is_cluster: whether it is a Redis Cluster.
        client: redis-py's, for commands about single keys.
    """

    def __init__(self, client: Any, url: str, *, is_cluster: bool) -> None:
        self.client, self.is_cluster, self.url = client, is_cluster, masked(url)
        self._refreshing = threading.Lock()
        self._refreshed = 0.0
        self._has_no_node = False
        self._refused_since: float | None = None
        self._pools: dict[int, Any] = {}

    def read(self, keys: Keys, timeout_seconds: float) -> list[Reply]:
        """Return the value of each key, in their order; None for a key that Redis does not have.

        Raises:
            RowStoreError: a node has not answered in time, or refused.
        """
        calls = self._calls(b"MGET", keys)
        found = [value for replies in self._run(calls, timeout_seconds) for value in replies]
        if calls.order is None:
            return found
        ordered = np.empty(len(found), object)
        ordered[calls.order] = found
        values: list[Reply] = ordered.tolist()
        return values

    def write(self, keys: Keys, values: _Bytes, timeout_seconds: float) -> None:
        """Set the value of each key to a line of `values` [n, row_bytes].

        Raises:
            RowStoreError: a node has not answered in time, or refused. Some values may be written.
        """
        self._run(self._calls(b"MSET", keys, values), timeout_seconds)

    def remove(self, keys: Keys, timeout_seconds: float) -> None:
        """Remove the keys that exist.

        Raises:
            RowStoreError: a node has not answered in time, or refused.
        """
        self._run(self._calls(b"UNLINK", keys), timeout_seconds)

    def ask(self, *words: Any, timeout_seconds: float = 10.0) -> Any:
        """Return the reply to a command about one key. Retries it like the others.

        Raises:
            RowStoreError: the node has not answered in time, or refused.
        """
        for error in self._attempts(timeout_seconds):
            try:
                reply = self.client.execute_command(*words)
            except _errors() as raised:
                error.append(raised)
            else:
                self._refused_since = None
                return reply
        raise AssertionError("the attempts end with an error")

    def close(self) -> None:
        """Close all connections."""
        if self.is_cluster:  # RedisCluster.close leaves those that `get_connection` of a node has opened
            for node in self.client.get_nodes():
                if node.redis_connection is not None:
                    node.redis_connection.connection_pool.disconnect()
        self.client.close()

    def _calls(self, verb: bytes, keys: Keys, values: _Bytes | None = None) -> Calls:
        return Calls(verb, keys.keys, keys.buckets if self.is_cluster else None, values)

    def _run(self, calls: Calls, timeout_seconds: float) -> list[Any]:
        """Return the reply to each span of `calls`. What failed because a node did is retried until the time is over."""
        found: dict[KeySpan, Any] = {}
        left: Sequence[KeySpan] = calls.spans
        for errors in self._attempts(timeout_seconds):
            try:
                found |= self._send(calls, left, errors)
            except _errors() as raised:
                errors.append(raised)
            if not (left := [span for span in left if span not in found]):
                return [found[span] for span in calls.spans]
            if _is_moving(errors):
                found |= self._singly(calls, left, errors)
                if not (left := [span for span in left if span not in found]):
                    return [found[span] for span in calls.spans]
        raise AssertionError("the attempts end with an error")

    def _attempts(self, timeout_seconds: float) -> Iterator[list[Exception]]:
        """Yield a list for the errors of each attempt. Raises RowStoreError after the last, or if no other attempt would help.

        Commands share the time for which Redis refuses connections: after it, each fails with its first attempt.
        """
        ends, pause = time.monotonic() + timeout_seconds, _FIRST_PAUSE_SECONDS
        while True:
            errors: list[Exception] = []
            yield errors
            last, stops = errors[-1], ends
            if self._is_away(last):
                since = self._refused_since = self._refused_since or time.monotonic()
                stops = min(ends, since + _REFUSED_SECONDS)
            if not _is_passing(last) or time.monotonic() + pause > stops:
                raise _refusal(self.url, last) from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self._refresh()

    def _is_away(self, error: Exception) -> bool:
        """Returns True if the server refuses connections, or all nodes of the cluster do."""
        if not self.is_cluster:
            return _is_refused(error)
        if self._has_no_node:  # by an attempt before, perhaps of another command
            self._refresh()
        return self._has_no_node

    def _send(self, calls: Calls, spans: Sequence[KeySpan], errors: list[Exception]) -> dict[KeySpan, Any]:
        """Send all commands, then read all replies. Returns the replies of the nodes that answered, and adds the other errors."""
        by_pool: dict[Any, list[KeySpan]] = {}
        for span in spans:
            by_pool.setdefault(self._pool(span.bucket), []).append(span)
        opened: list[tuple[Any, Any, list[KeySpan]]] = []
        found: dict[KeySpan, Any] = {}
        try:
            for pool, chosen in by_pool.items():
                try:
                    connection = pool.get_connection()
                    opened.append((pool, connection, chosen))
                    connection.send_packed_command([b"".join([calls.encoded(span) for span in chosen])])
                except _errors() as error:
                    errors.append(error)
                    if opened and opened[-1][0] is pool:
                        _drop(*opened.pop()[:2])
            while opened:
                pool, connection, chosen = opened[-1]
                try:
                    for span in chosen:
                        found[span] = connection.read_response(disable_decoding=True)
                except _errors() as error:
                    errors.append(error)
                    _drop(pool, connection)
                else:
                    pool.release(connection)
                opened.pop()
        finally:  # an unread reply would be the answer to another request
            for pool, connection, _ in opened:
                _drop(pool, connection)
        if found:
            self._refused_since = None
        return found

    def _singly(self, calls: Calls, spans: Sequence[KeySpan], errors: list[Exception]) -> dict[KeySpan, Any]:
        """Return the replies to `spans`, key by key, while their slot moves to another node. redis-py follows the redirections."""
        found: dict[KeySpan, Any] = {}
        try:
            for span in spans:
                found[span] = [self.client.execute_command(*words) for words in calls.one_by_one(span)]
        except _errors() as error:
            errors.append(error)
        return found

    def _pool(self, bucket: int) -> Any:
        if not self.is_cluster:
            return self.client.connection_pool
        if (pool := self._pools.get(bucket)) is None:
            node = self.client.get_node_from_key(TAGS[bucket])
            pool = self._pools[bucket] = self.client.get_redis_connection(node).connection_pool
        return pool

    def _refresh(self) -> None:
        """Ask the cluster again which node has which slots. Threads that fail together ask once."""
        if not self.is_cluster:
            return
        asked = time.monotonic()
        with self._refreshing:
            if self._refreshed < asked:
                try:
                    self.client.nodes_manager.initialize()
                except _errors() as error:  # the next attempt reports what is wrong
                    self._has_no_node = _is_refused(error)
                else:
                    self._has_no_node, self._pools = False, {}
                self._refreshed = time.monotonic()


def _drop(pool: Any, connection: Any) -> None:
    connection.disconnect()
    pool.release(connection)


def _errors() -> tuple[type[Exception], ...]:
    from redis import exceptions

    return exceptions.RedisError, exceptions.RedisClusterException, OSError


def _is_refused(error: BaseException | None) -> bool:
    """Returns True if a connection was refused. redis-py raises its own errors from the system's, or while it handles it."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None


def _is_moving(errors: Sequence[Exception]) -> bool:
    """Returns True if a slot is on its way to another node. One that has arrived there is found by a refresh."""
    from redis import exceptions

    moving = exceptions.AskError, exceptions.TryAgainError
    return any(isinstance(error, moving) and not isinstance(error, exceptions.MovedError) for error in errors)


def _is_passing(error: Exception) -> bool:
    """Returns True if another attempt may succeed: a node failed, or a slot is on another one now."""
    from redis import exceptions as known

    if isinstance(error, known.AuthenticationError | known.AuthorizationError):
        return False
    passing = known.ConnectionError, known.TimeoutError, known.MovedError, known.AskError, known.TryAgainError
    more = known.ClusterDownError, known.MasterDownError, known.ReadOnlyError, known.RedisClusterException, OSError
    return isinstance(error, (*passing, *more))


def _refusal(url: str, error: Exception) -> RowStoreError:
    from redis import exceptions

    text = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
    remedy = "Check its address, and that it runs"
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
        remedy = f"Set {PASSWORD_VARIABLE}, or give redis_password_file"
        if "HELLO" in text or "required" in text:  # the commands by which a client may log in
            text = "asks for a password"
    elif text.startswith("OOM") or "maxmemory" in text:
        remedy = "Give Redis more memory, or remove other keys"
    elif "CROSSSLOT" in text or "unknown command" in text:
        remedy = "Use Redis 4 or later, or Valkey, without a proxy in front"
    return RowStoreError(f"Redis at {masked(url)}: {text}. {remedy}.")


def check_url(url: str) -> None:
    """Raise ConfigError unless `url` is one of Redis, without a password."""
    parts = _split(url)
    if not url.startswith(("redis://", "rediss://")):
        shown = url if re.fullmatch(r"[\w.-]+:\d+", url) else masked(url)
        raise ConfigError(
            f"URL {shown}: must begin with redis:// or rediss://, in lower case. Write redis://HOST:PORT."
        )
    if not parts.hostname or parts.port == 0:
        raise ConfigError(f"URL {masked(url)}: needs a host, and a port above 0. Write redis://HOST:PORT.")
    options = parse_qs(parts.query, keep_blank_values=True)
    if parts.password is not None or "password" in options:
        raise ConfigError(
            f"URL {masked(url)}: has a password, which other users of the machine can see. Set {PASSWORD_VARIABLE}, or give "
            "redis_password_file."
        )
    allowed = _TLS_OPTIONS if parts.scheme == "rediss" else ()
    if unknown := sorted(options.keys() - set(allowed)):
        text = f"has the option {unknown[0]!r}, and {parts.scheme}:// takes {', '.join(allowed) or 'none'}"
        raise ConfigError(f"URL {masked(url)}: {text}. Remove it.")


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ConfigError("URL: its host or port is wrong. Write redis://HOST:PORT.") from None
    return parts
