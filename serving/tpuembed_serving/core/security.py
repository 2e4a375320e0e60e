"""Who may ask, over what, and how much: the settings. Everything is off that TensorFlow Serving does not have."""

import dataclasses

from tpuembed.errors import ConfigError
from tpuembed_serving.core.api_keys import ApiKeys
from tpuembed_serving.core.checks import check_positive
from tpuembed_serving.core.tls import TlsSettings

__all__ = ["ConnectionLimits", "SecuritySettings"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """What one process accepts of HTTP.

    Attributes:
        connections: open at once; more are answered 503 and closed. None is no limit but the system's own.
        header_bytes: of a request's line and headers; more are answered 431.
        receive_seconds: in which a request must have come, from the opening of the connection or its own first byte; and in which
            a client must have taken some of its answer.
    """

    connections: int | None = None
    header_bytes: int = 64 << 10
    receive_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("connections", "header_bytes", "receive_seconds"):
            check_positive(name, getattr(self, name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecuritySettings:
    """Of both ports, but for what is HTTP's alone.

    Attributes:
        api_keys: one of them opens everything but health checks, which need none; None lets everybody in.
        tls: None is plain text.
        cors: whether pages of other sites may ask, as TensorFlow Serving's --rest_api_enable_cors_support.
        limits: of connections.
        max_rows: of a request; None is no limit.
        max_json_depth: of a request body, 1024 or more: so deep the fast parser goes in any case. None is no limit.
    """

    api_keys: ApiKeys | None = None
    tls: TlsSettings | None = None
    cors: bool = False
    limits: ConnectionLimits = dataclasses.field(default_factory=ConnectionLimits)
    max_rows: int | None = None
    max_json_depth: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_rows", 1), ("max_json_depth", 1024)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}: give {least} or more")
