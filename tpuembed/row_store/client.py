"""Reads and writes rows in Redis by redis-py: a few commands for many rows, and one round trip to each node."""

import contextlib
import functools
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from urllib.parse import SplitResult, parse_qs, urlsplit

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError, MissingExtraError, RowStoreError
from tpuembed.row_store.keys import RowKeys, hash_of

__all__ = ["PASSWORD_VARIABLE", "RowStore", "check_url", "connect"]

PASSWORD_VARIABLE: Final = "TPUEMBED_REDIS_PASSWORD"
PUBLISHER: Final = "publisher"
"""The field of a model's hash with the token of the publish that began last."""
_NOTE: Final = f"""
if redis.call('HGET', KEYS[1], '{PUBLISHER}') ~= ARGV[1] then return 0 end
if ARGV[3] then redis.call('HSET', KEYS[1], ARGV[2], ARGV[3]) else redis.call('HDEL', KEYS[1], ARGV[2]) end
return 1
"""
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
_READ_BYTES: Final = 256 << 10
_MOST_KEYS: Final = 1024
"""Keys of a command. Redis answers other clients between two commands, and not within one."""
_TRIES: Final = 2
"""Further tries after a connection breaks: one that was idle while Redis was started again breaks once."""
_THREADS: Final = 32
"""Nodes that are asked at once, for all requests of a process."""


def connect(url: str, *, timeout_seconds: float = 5.0) -> "RowStore":
    """Connect to the Redis at `url`, redis://[USER@]HOST:PORT[/DB], or rediss:// for TLS. A cluster is recognised.

    The password is in the variable TPUEMBED_REDIS_PASSWORD.

    Args:
        url: without a password.
        timeout_seconds: how long a node may take for an answer.

    Raises:
        ConfigError: `url` is no such URL, or has a password.
        RowStoreError: there is no Redis, or it refuses the password.
        MissingExtraError: redis-py is not installed.
    """
    check_url(url)
    try:
        import redis
        from redis.backoff import ConstantBackoff
        from redis.retry import Retry
    except ImportError:
        raise MissingExtraError("redis://", "redis", "redis") from None
    options: dict[str, Any] = {
        "password": os.environ.get(PASSWORD_VARIABLE) or None,
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": min(_CONNECT_SECONDS, timeout_seconds),
        "socket_read_size": _READ_BYTES,
        # A node that does not answer is not asked again, because the request would wait several times as long.
        "retry": Retry(ConstantBackoff(0.05), _TRIES, supported_errors=(redis.ConnectionError,)),
    }
    with _refusals(url), contextlib.ExitStack() as opened:
        client: Any = redis.Redis.from_url(url, **options)
        opened.callback(client.close)
        is_cluster = bool(client.info("cluster")["cluster_enabled"])
        if is_cluster:
            return RowStore(redis.RedisCluster.from_url(url, **options), url, is_cluster=True)
        opened.pop_all()
        return RowStore(client, url, is_cluster=False)


class RowStore:
    """A connection to Redis, for any number of threads. Methods raise RowStoreError if a node does not answer in time, or refuses.

    Attributes:
        url: without a password, for messages.
        client: redis-py's, for commands about single keys.
        refusals: returns a context, in which errors of `client` become RowStoreErrors.
    """

    def __init__(self, client: Any, url: str, *, is_cluster: bool) -> None:
        self.client, self.url, self._is_cluster = client, masked(url), is_cluster
        self.refusals = functools.partial(_refusals, url)
        self._threads = ThreadPoolExecutor(_THREADS, "redis") if is_cluster else None

    def read(self, keys: RowKeys) -> list[bytes | None]:
        """Return the value of each key, in their order; None for a key that Redis does not have."""
        order, spans = self._spans(keys)
        texts = keys.texts(order)
        found = np.empty(len(texts), object)
        replies = self._run([("MGET", *texts[start:stop]) for start, stop in spans])
        found[order] = list(itertools.chain.from_iterable(replies))
        values: list[bytes | None] = found.tolist()
        return values

    def write(self, keys: RowKeys, values: npt.NDArray[np.uint8]) -> None:
        """Set the value of each key to a line of `values` [n, row_bytes].

        If it fails, some values may be written.
        """
        order, spans = self._spans(keys)
        lines = np.ascontiguousarray(values[order]).view(f"V{values.shape[1]}")[:, 0].tolist()
        words = list(itertools.chain.from_iterable(zip(keys.texts(order), lines, strict=True)))
        self._run([("MSET", *words[2 * start : 2 * stop]) for start, stop in spans])

    def remove(self, keys: RowKeys) -> None:
        """Remove the keys that exist."""
        order, spans = self._spans(keys)
        texts = keys.texts(order)
        self._run([("UNLINK", *texts[start:stop]) for start, stop in spans])

    def records(self, model: str, prefix: str) -> dict[str, Any]:
        """Return what the hash of a model has in the fields that begin with `prefix`, by the rest of their names."""
        with self.refusals():
            fields: dict[bytes, bytes] = self.client.hgetall(hash_of(model))
        start = prefix.encode()
        try:
            return {
                key[len(start) :].decode(): json.loads(value) for key, value in fields.items() if key.startswith(start)
            }
        except ValueError:
            raise RowStoreError(
                f"Redis at {self.url}: tpuembed publish did not write the key {hash_of(model)}. Use another name or database."
            ) from None

    def note(self, model: str, token: str, field: str, value: str | None) -> bool:
        """Set a field of a model's hash, or remove it for None. Returns False if the publisher is not the one with this token."""
        with self.refusals():
            return bool(self.client.eval(_NOTE, 1, hash_of(model), token, field, *([] if value is None else [value])))

    def ping(self) -> None:
        """Ask whether Redis answers: of a cluster the masters, because rows are not read from replicas."""
        with self.refusals():
            self.client.ping(**({"target_nodes": "primaries"} if self._is_cluster else {}))

    def close(self) -> None:
        """Close all connections."""
        if self._threads is not None:
            self._threads.shutdown()
            self.client.disconnect_connection_pools()  # close() leaves those that RedisCluster.from_url made
        self.client.close()

    def _spans(self, keys: RowKeys) -> tuple[npt.NDArray[np.int64], list[tuple[int, int]]]:
        """Return the order of the keys in commands, and which of them each command has: keys of one slot in a cluster."""
        count = len(keys.tags)
        order, cuts = np.arange(count), [0, count]
        if self._is_cluster:
            order = np.argsort(keys.tags, kind="stable")
            cuts[1:1] = (np.flatnonzero(np.diff(keys.tags[order])) + 1).tolist()
        return order, [
            (start, min(start + _MOST_KEYS, stop))
            for first, stop in itertools.pairwise(cuts)
            for start in range(first, stop, _MOST_KEYS)
        ]

    def _run(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the reply to each command. All commands for a node are sent at once."""
        with self.refusals():
            if self._threads is None:
                return _run_on(self.client, commands)
            import redis

            try:
                return self._run_on_nodes(self._threads, commands)
            except (redis.exceptions.ResponseError, redis.ConnectionError):  # a slot moves, or a node has gone
                # redis-py's own pipeline finds the slots again, and follows redirections: of single keys also while their slot
                # is on two nodes. It takes several times longer.
                replies = iter(_run_on(self.client, [one for command in commands for one in _singly(command)]))
                return [list(itertools.islice(replies, len(_singly(command)))) for command in commands]

    def _run_on_nodes(self, threads: ThreadPoolExecutor, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        by_node: dict[str, tuple[Any, list[int]]] = {}
        for number, command in enumerate(commands):
            node = self.client.get_node_from_key(command[1])
            by_node.setdefault(node.name, (node, []))[1].append(number)
        replies: list[Any] = [None] * len(commands)

        def run(node: Any, numbers: Sequence[int]) -> None:
            found = _run_on(self.client.get_redis_connection(node), [commands[number] for number in numbers])
            for number, reply in zip(numbers, found, strict=True):
                replies[number] = reply

        *others, own = by_node.values()
        waiting = [threads.submit(run, *one) for one in others]
        run(*own)
        for each in waiting:
            each.result()
        return replies


def _singly(command: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return a command for each key of `command`."""
    verb, *words = command
    if verb == "MSET":
        return [("SET", *pair) for pair in zip(words[::2], words[1::2], strict=True)]
    return [("GET" if verb == "MGET" else verb, word) for word in words]


def _run_on(client: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    with client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = pipeline.execute()
        return replies


@contextlib.contextmanager
def _refusals(url: str) -> Iterator[None]:
    from redis import exceptions

    try:
        yield
    except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
        said = str(error).rpartition("caused error: ")[2]  # before it are the values of the command
        text = " ".join(said.split())[:300].rstrip(".") or type(error).__name__
        remedy = "Check the rights of the user, the database and the settings of Redis"
        if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError):
            remedy = "Check its address, that it runs, and whether it wants TLS (rediss://)"
        if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
            remedy = f"Set {PASSWORD_VARIABLE}"
            if "HELLO" in text or "required" in text:  # the commands by which a client may log in
                text = "asks for a password"
        elif text.startswith("OOM") or "maxmemory" in text:
            remedy = "Give Redis more memory, or remove other keys"
        elif "CROSSSLOT" in text or "unknown command" in text:
            remedy = "Use Redis 4 or later, or Valkey, without a proxy in front"
        raise RowStoreError(f"Redis at {masked(url)}: {text}. {remedy}.") from None


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
    if not re.fullmatch(r"(/[0-9]{0,9})?", parts.path) or parts.fragment:
        where = f"{parts.path}#{parts.fragment}" if parts.fragment else parts.path
        raise ConfigError(f"URL {masked(url)}: {where!r} is not the number of a database. Write redis://HOST:PORT/DB.")
    options = parse_qs(parts.query, keep_blank_values=True)
    if parts.password is not None or "password" in options:
        raise ConfigError(
            f"URL {masked(url)}: has a password, which other users of the machine can see. Set {PASSWORD_VARIABLE}."
        )
    allowed = _TLS_OPTIONS if parts.scheme == "rediss" else ()
    if unknown := sorted(options.keys() - set(allowed)):
        text = f"has the option {unknown[0]!r}, and {parts.scheme}:// takes {', '.join(allowed) or 'none'}"
        raise ConfigError(f"URL {masked(url)}: {text}. Remove it.")


def masked(url: str) -> str:
    """Return `url` for a message: without a password, and without the options after "?"."""
    parts = _split(url)
    if not parts.netloc:
        return parts.path.rpartition("@")[2]
    host = parts.netloc.rpartition("@")[2]
    user = f"{parts.username}@" if parts.username else ""
    return f"{parts.scheme}://{user}{host}{parts.path}"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ConfigError("URL: its host or port is wrong. Write redis://HOST:PORT.") from None
    return parts
