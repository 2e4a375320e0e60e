"""The server of the contract's tests of access and limits: TLS on both ports, API keys, pages of other sites, and low limits."""

import http.client
import ssl
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import trustme

from tests.support.contract_serve import Server, shared, time_limit
from tests.support.serving.models import save_scale, save_zoo

__all__ = ["ADMIN", "COLON", "KEY", "MAX_BODY_BYTES", "SPACED", "StrictServer", "strict_server"]

KEY: Final = "the-key-of-an-application-0123456789"
ADMIN: Final = "the-key-of-an-operator-0123456789"
SPACED: Final = "the_key~of-a-line-with-spaces-9876543210"
COLON: Final = "old:the-key-of-a-line-0123456789"
"""A colon without a space is of the key."""
MAX_BODY_BYTES: Final = 200_000

_SERVER: Final = pytest.StashKey[Server]()


class StrictServer(Server):
    """A server of zoo (version 1), behind TLS. Beside it in `folder` is scale, which nobody serves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        save_zoo(folder / "zoo" / "1")
        save_scale(folder / "scale" / "1", 2.0)
        authority = trustme.CA()
        authority.cert_pem.write_to_path(folder / "authority.pem")
        pem = folder / "server.pem"
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
        self.keys = folder / "keys"
        self.keys.write_text(
            f"# keys of the test\napp: {KEY}\noperator admin: {ADMIN}\n\n  {SPACED}  \n{COLON}\n", encoding="utf-8"
        )
        super().__init__(
            folder / "zoo",
            folder / "log",
            *("--tls-cert", str(pem), "--tls-key", str(pem), "--api-key-file", str(self.keys), "--enable-cors"),
            *("--max-body-bytes", str(MAX_BODY_BYTES), "--max-request-memory", "32MiB", *time_limit(2)),
            *("--run-threads", "1", "--max-queued-requests", "2", "--metrics"),
        )

    def connect(self) -> http.client.HTTPConnection:
        """Connect with TLS."""
        context = ssl.create_default_context(cafile=self.folder / "authority.pem")
        return http.client.HTTPSConnection(self.host, self.port, timeout=60, context=context)

    def open_channel(self) -> Any:
        """Return a channel with TLS."""
        credentials = grpc.ssl_channel_credentials((self.folder / "authority.pem").read_bytes())
        return grpc.secure_channel(self.grpc_address, credentials)


def strict_server(config: pytest.Config, folders: pytest.TempPathFactory) -> StrictServer:
    """Return the server, which the first file that asks starts."""
    server = shared(config, _SERVER, lambda: StrictServer(folders.mktemp("contract_strict")))
    assert isinstance(server, StrictServer)
    return server
