"""Both ports behind TLS with certificates of clients; and keys and certificates that change while clients ask."""

import collections
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2

from tests.support.serving.doubles import wait_for
from tests.support.serving.models import save_scale
from tests.support.serving.process import ServerProcess

KEY = "the-key-of-this-test-0123456789"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("security")
    save_scale(folder / "scale" / "1", 2.0)
    ours, others = trustme.CA(), trustme.CA()
    ours.cert_pem.write_to_path(folder / "ca")
    for name, authority in (("server", ours), ("client", ours), ("stranger", others)):
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_and_cert_chain_pem.write_to_path(folder / f"{name}.pem")
    (folder / "keys").write_text(f"{KEY}\n")
    return folder


class Protected(ServerProcess):
    """Asks for everything that can be asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        pem = str(folder / "server.pem")
        tls = ["--tls-cert", pem, "--tls-key", pem, "--tls-client-ca", str(folder / "ca")]
        more = ["--api-key-file", str(folder / "keys"), "--enable-cors", "--grpc-port", "0"]
        super().__init__(folder / "scale", folder / "log", *tls, *more)

    def client(self, certificate: str | None = "client", **headers: str) -> httpx.Client:
        context = ssl.create_default_context(cafile=self.folder / "ca")
        if certificate is not None:
            context.load_cert_chain(self.folder / f"{certificate}.pem")
        return httpx.Client(base_url=f"https://127.0.0.1:{self.port}", verify=context, timeout=60, headers=headers)

    def certificate(self) -> str:
        """The certificate that a new connection gets, as PEM."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(self.folder / "client.pem")
        with socket.create_connection(("127.0.0.1", self.port)) as plain, context.wrap_socket(plain) as secure:
            return ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"")

    def channel(self, certificate: str | None = "client") -> Any:
        pair: tuple[bytes, bytes] | tuple[None, None] = (None, None)
        if certificate is not None:
            pem = (self.folder / f"{certificate}.pem").read_bytes()
            pair = (pem, pem)
        credentials = grpc.ssl_channel_credentials((self.folder / "ca").read_bytes(), *pair)
        return grpc.secure_channel(self.grpc_address, credentials)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Protected]:
    with Protected(folder) as running, running.client() as client:
        while client.get("/readyz").status_code != 200:
            assert running.process.poll() is None, running.log
        yield running


def predict(client: httpx.Client, **headers: str) -> httpx.Response:
    return client.post("/v1/models/scale:predict", content=b'{"instances": [1.5, 2]}', headers=headers)


@pytest.mark.parametrize("certificate", [None, "stranger"])
def test_a_client_needs_a_certificate_of_the_authority(server: Protected, certificate: str | None) -> None:
    """On both ports; a key does not stand for it."""
    with server.client() as client:
        assert predict(client, **{"x-api-key": KEY}).json() == {"predictions": [3.0, 4.0]}
    with server.client(certificate) as client, pytest.raises(httpx.TransportError):
        predict(client, **{"x-api-key": KEY})
    with server.channel() as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", None, health_pb2.HealthCheckResponse.FromString)
        assert check(b"", timeout=60).status == health_pb2.HealthCheckResponse.SERVING
    with server.channel(certificate) as channel, pytest.raises(grpc.RpcError) as nobody:
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
    assert nobody.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.nightly
def test_keys_and_certificates_are_read_again_without_a_dropped_request(folder: Path, tmp_path: Path) -> None:
    """A file that protects nothing changes nothing; connections of before stay."""
    shutil.copytree(folder, tmp_path / "files")
    with Protected(tmp_path / "files") as running, running.client(**{"x-api-key": KEY}) as old:
        while old.get("/readyz").status_code != 200:
            assert running.process.poll() is None, running.log
        statuses, done = collections.Counter[int](), threading.Event()

        def ask() -> None:
            while not done.is_set():
                statuses[predict(old).status_code] += 1

        asking = threading.Thread(target=ask)
        asking.start()
        keys, pem = running.folder / "keys", running.folder / "server.pem"
        before = pem.read_bytes()
        try:
            keys.write_text("short\n")
            wait_for(lambda: "a key needs at least 16 characters" in running.log)
            keys.write_text(f"{KEY}\nnext: {KEY}-of-tomorrow\n")
            wait_for(lambda: "read again, 2 keys" in running.log)
            pem.write_bytes(before[: len(before) // 2])
            wait_for(lambda: "TLS certificate" in running.log)
            assert running.certificate() in before.decode()
            new = trustme.CA()
            new.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
            wait_for(lambda: "read again, for new connections" in running.log)
            assert running.certificate() in pem.read_text()
        finally:
            done.set()
            asking.join()
        assert statuses.keys() == {200}
        new.cert_pem.write_to_path(running.folder / "ca.new")
        trusted = ssl.create_default_context(cafile=running.folder / "ca.new")
        trusted.load_cert_chain(running.folder / "client.pem")
        with httpx.Client(base_url=f"https://127.0.0.1:{running.port}", verify=trusted) as client:
            assert predict(client, **{"x-api-key": f"{KEY}-of-tomorrow"}).json() == {"predictions": [3.0, 4.0]}
        pair = ((running.folder / "client.pem").read_bytes(),) * 2
        credentials = grpc.ssl_channel_credentials((running.folder / "ca.new").read_bytes(), *pair)
        with grpc.secure_channel(running.grpc_address, credentials) as channel:
            grpc.channel_ready_future(channel).result(timeout=20)
        keys.write_text(f"next: {KEY}-of-tomorrow\n")
        wait_for(lambda: "read again, 1 keys" in running.log)
        assert predict(old).status_code == 401
