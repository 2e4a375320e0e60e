"""TLS of both ports, and optional client certificates."""

import dataclasses
import ssl
from pathlib import Path
from typing import Any

from tpuembed.errors import ConfigError

__all__ = ["TlsSettings"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsSettings:
    """Files in PEM format, read when the server starts, and again after a change.

    Attributes:
        certificate: the server's certificate, with the chain to its root.
        key: its private key, without a password.
        client_ca: certificates of authorities. Clients need a certificate of one of them. None accepts all clients.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None
    _reloads: list[None] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    @property
    def files(self) -> list[Path]:
        """Return the files."""
        return [self.certificate, self.key, *([self.client_ca] if self.client_ca else [])]

    def reload(self, context: ssl.SSLContext) -> str:
        """Read the files again, for new connections of HTTP with this `context` and of gRPC. Return the line to log.

        An authority that is no longer in the file stays accepted over HTTP, because a context forgets none.

        Raises:
            ConfigError: they do not fit. Those of before stay in use.
        """
        self._load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        self._load_into(context)
        self._reloads.append(None)
        return f"TLS certificate {self.certificate}: read again, for new connections"

    def _load_into(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"TLS certificate {self.certificate} with key {self.key}: {_reason(error)}. Give both in PEM format, and the "
                "key of this certificate without a password"
            ) from None
        if self.client_ca is None:
            return
        try:
            context.load_verify_locations(self.client_ca)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"TLS client authorities {self.client_ca}: {_reason(error)}. Give their certificates in PEM format"
            ) from None

    def uvicorn_options(self) -> dict[str, Any]:
        """Return the TLS options of uvicorn.Config."""
        options: dict[str, Any] = {"ssl_certfile": str(self.certificate), "ssl_keyfile": str(self.key)}
        if self.client_ca is not None:
            options |= {"ssl_ca_certs": str(self.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return options

    def grpc_credentials(self) -> Any:
        """Return the grpc.ServerCredentials. Connections after a `reload` get what the files have then."""
        import grpc

        def read() -> Any:
            authorities = None if self.client_ca is None else self.client_ca.read_bytes()
            pair = (self.key.read_bytes(), self.certificate.read_bytes())
            return grpc.ssl_server_certificate_configuration([pair], authorities)

        known = len(self._reloads)

        def fetch() -> Any:
            """Return the configuration if it is new, or None; gRPC calls this for each handshake."""
            nonlocal known
            if known == len(self._reloads):
                return None
            known = len(self._reloads)
            return read()

        return grpc.dynamic_ssl_server_credentials(read(), fetch, self.client_ca is not None)


def _no_password(*_: object) -> str:
    """Raise ValueError: OpenSSL would otherwise ask for the password on the terminal."""
    raise ValueError("the key has a password")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason.replace("_", " ").lower() if error.reason else "not in PEM format"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
