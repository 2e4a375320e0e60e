"""Certificates of both ports: TLS, and certificates of clients where they are asked for."""

import dataclasses
import ssl
from pathlib import Path
from typing import Any

from tpuembed.errors import ConfigError

__all__ = ["TlsSettings"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsSettings:
    """Files in PEM form, read when the server starts.

    Attributes:
        certificate: of the server, with the chain to its root.
        key: its private key, without a password.
        client_ca: certificates of authorities; clients need a certificate of one of them. None lets everybody in.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def __post_init__(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"TLS certificate {self.certificate} with key {self.key}: {_reason(error)}; give both in PEM form, and a key "
                "without a password that belongs to the certificate"
            ) from None
        if self.client_ca is not None:
            self._check_authorities(context, self.client_ca)

    def _check_authorities(self, context: ssl.SSLContext, path: Path) -> None:
        try:
            context.load_verify_locations(path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"TLS client authorities {path}: {_reason(error)}; give their certificates in PEM form"
            ) from None

    def uvicorn_options(self) -> dict[str, Any]:
        """Of uvicorn.Config."""
        options: dict[str, Any] = {"ssl_certfile": str(self.certificate), "ssl_keyfile": str(self.key)}
        if self.client_ca is not None:
            options |= {"ssl_ca_certs": str(self.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return options

    def grpc_credentials(self) -> Any:
        """grpc.ServerCredentials."""
        import grpc

        pair = [(self.key.read_bytes(), self.certificate.read_bytes())]
        if self.client_ca is None:
            return grpc.ssl_server_credentials(pair)
        return grpc.ssl_server_credentials(pair, self.client_ca.read_bytes(), require_client_auth=True)


def _no_password(*_: object) -> str:
    """Nobody is there to type one."""
    raise ValueError("the key has a password")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
