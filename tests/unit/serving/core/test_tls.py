"""Certificates that are none, and keys of others."""

from pathlib import Path

import pytest
import trustme

from tpuembed.errors import ConfigError
from tpuembed_serving.core.tls import TlsSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca")
    for name in ("one", "two"):
        issued = authority.issue_cert("localhost")
        issued.cert_chain_pems[0].write_to_path(folder / f"{name}.crt")
        issued.private_key_pem.write_to_path(folder / f"{name}.key")
    (folder / "text").write_text("no certificate")
    key = (folder / "one.key").read_text()
    assert "ENCRYPTED" not in key
    (folder / "locked.key").write_bytes(_locked(key.encode()))
    return folder


def _locked(key: bytes) -> bytes:
    from cryptography.hazmat.primitives import serialization as pem

    kind = pem.BestAvailableEncryption(b"secret")
    private = pem.load_pem_private_key(key, None)
    return private.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, kind)


def test_what_belongs_together_is_taken(folder: Path) -> None:
    settings = TlsSettings(certificate=folder / "one.crt", key=folder / "one.key", client_ca=folder / "ca")
    assert settings.uvicorn_options()["ssl_ca_certs"] == str(folder / "ca")
    assert settings.grpc_credentials()


@pytest.mark.parametrize(
    ("certificate", "key", "client_ca", "words"),
    [
        ("one.crt", "two.key", None, "mismatch"),
        ("none", "one.key", None, "No such file"),
        ("text", "one.key", None, "key without a password|in PEM format"),
        ("one.crt", "locked.key", None, "the key has a password"),
        ("one.crt", "one.key", "text", "TLS client authorities .*text"),
        ("one.crt", "one.key", "none", "TLS client authorities .*none: No such file"),
    ],
)
def test_what_does_not_is_refused_with_its_name(
    folder: Path, certificate: str, key: str, client_ca: str | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        TlsSettings(
            certificate=folder / certificate,
            key=folder / key,
            client_ca=None if client_ca is None else folder / client_ca,
        )
