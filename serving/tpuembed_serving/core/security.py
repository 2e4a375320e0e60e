"""Settings of API keys, TLS, CORS and limits. Everything that TensorFlow Serving does not have is off by default."""

import dataclasses

from tpuembed.errors import ConfigError
from tpuembed_serving.core.api_keys import ApiKeys
from tpuembed_serving.core.tls import TlsSettings

__all__ = ["ConnectionLimits", "SecuritySettings", "check_positive"]


def check_positive(name: str, value: float | None) -> None:
    """Raise ConfigError unless `value` is above 0 or None."""
    if value is not None and not value > 0:
        raise ConfigError(f"{name} is {value}. Give a number above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits of the HTTP connections of one process.

    Attributes:
        connections: the most open connections. Others are answered 503 and closed. None is the system's limit.
        header_bytes: the most bytes of a request's line and headers. Longer ones are answered 431.
        receive_seconds: the time for a request to arrive, from the opening of the connection or its first byte. Also the
            time in which a client must read some of its answer.
    """

    connections: int | None = None
    header_bytes: int = 64 << 10
    receive_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("connections", "header_bytes", "receive_seconds"):
            check_positive(name, getattr(self, name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecuritySettings:
    """Security settings of both ports. CORS and `limits` concern HTTP only.

    Attributes:
        api_keys: a request needs one of them; health checks need none. None accepts all requests.
        tls: the certificate; None is plain text.
        cors: whether pages of other sites may send requests, as TensorFlow Serving's --rest_api_enable_cors_support.
        limits: limits of connections.
    """

    api_keys: ApiKeys | None = None
    tls: TlsSettings | None = None
    cors: bool = False
    limits: ConnectionLimits = dataclasses.field(default_factory=ConnectionLimits)
