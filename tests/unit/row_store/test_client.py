"""URLs and passwords. Messages never have a password."""

from pathlib import Path

import pytest

from tests.support.messages import refused
from tpuembed.errors import ConfigError, RowStoreError
from tpuembed.row_store import connect, masked, password_of
from tpuembed.row_store.client import PASSWORD_VARIABLE


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:s3cret@host:1/0",
        "rediss://:s3cret@host",
        "redis://host?password=s3cret",
        "http://u:s3cret@host",
        "redis://",
        "u:s3cret@host:6379",
        "redis://u:s3cret@host:port",
        " redis://host:1",
        "REDIS://host:1",
        "redis://host:0",
        "redis://host:1?decode_responses=True",
        "redis://host:1?ssl_ca_certs=ca.pem",
        "rediss://host:1?ssl_ca_cert=ca.pem",
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    with refused(ConfigError) as caught:
        connect(url)
    assert "s3cret" not in str(caught.value)


def test_masked() -> None:
    assert masked("rediss://me:s3cret@host:6380/2?ssl_ca_certs=ca.pem") == "rediss://me@host:6380/2"
    assert masked("redis://host") == "redis://host"


def test_where_the_password_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    assert password_of(None) is None
    monkeypatch.setenv(PASSWORD_VARIABLE, "from the environment")
    assert password_of(None) == "from the environment"
    path = tmp_path / "password"
    with refused(ConfigError):
        password_of(path)
    path.write_text("\n")
    with refused(ConfigError):
        password_of(path)
    path.write_text("from a file\n")
    assert password_of(path) == "from a file"


def test_no_redis() -> None:
    with refused(RowStoreError):
        connect("redis://127.0.0.1:1")
