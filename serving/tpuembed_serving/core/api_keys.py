"""Who may ask: API keys in a file, compared in constant time."""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from tpuembed.errors import ConfigError

__all__ = ["ApiKeys"]

_LEAST_CHARACTERS = 16
_OWN = "x-api-key"
_BEARER = "bearer "


class ApiKeys:
    """Any of some keys opens everything. Only their hashes are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = [_hash(key.encode()) for key in keys]

    @classmethod
    def read(cls, path: Path) -> Self:
        """The keys in the file at `path`, one a line; empty lines and those that begin with # are none.

        Raises:
            ConfigError: it cannot be read, has no key, or has one that is easily guessed or cannot be sent.
        """
        try:
            text = path.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
            raise ConfigError(f"API key file {path}: cannot be read: {reason}") from None
        lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1))
        keys = {number: line for number, line in lines if line and not line.startswith("#")}
        if not keys:
            raise ConfigError(f"API key file {path}: has no key; write one a line")
        for number, key in keys.items():
            if len(key) < _LEAST_CHARACTERS or not key.isprintable() or " " in key:
                raise ConfigError(
                    f"API key file {path}, line {number}: a key has at least {_LEAST_CHARACTERS} characters and no space; "
                    'make one, for example with python -c "import secrets; print(secrets.token_urlsafe())"'
                )
        return cls(keys.values())

    def accept(self, headers: Iterable[tuple[bytes | str, bytes | str]]) -> bool:
        """Whether a request with these headers (or gRPC metadata) has a key: `Authorization: Bearer KEY` or `X-API-Key: KEY`.

        A request with several is accepted by any of them.
        """
        found = [key for name, value in headers if (key := _key(_bytes(name), _bytes(value))) is not None]
        return any(self._knows(key) for key in found)

    def _knows(self, key: bytes) -> bool:
        """All are compared: which one it is like does not show in the time either."""
        hashed = _hash(key)
        return any([hmac.compare_digest(hashed, known) for known in self._hashes])  # noqa: C419 - not the first alone


def _key(name: bytes, value: bytes) -> bytes | None:
    lowered = name.lower()
    if lowered == _OWN.encode():
        return value.strip()
    if lowered == b"authorization" and value[: len(_BEARER)].lower() == _BEARER.encode():
        return value[len(_BEARER) :].strip()
    return None


def _bytes(text: bytes | str) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
