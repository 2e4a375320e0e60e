"""API keys from a file, compared in constant time."""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from tpuembed.errors import ConfigError, reason

__all__ = ["KEY_REFUSAL", "ApiKeys"]

KEY_REFUSAL = "no valid API key. Send one as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
"""The error of a request without a key."""

_LEAST_CHARACTERS = 16
_OWN = "x-api-key"
_BEARER = "bearer "


class ApiKeys:
    """A set of keys, each of which allows every request. Only their hashes are stored."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = [_hash(key.encode()) for key in keys]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the keys from the file at `path`, one per line. Empty lines and lines that begin with # are skipped.

        Raises:
            ConfigError: the file cannot be read or has no key, or a key is too short or has a space.
        """
        try:
            text = path.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            why = reason(error) if isinstance(error, OSError) else "it is not ASCII. Write keys in ASCII"
            raise ConfigError(f"API key file {path}: cannot be read: {why}") from None
        lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1))
        keys = {number: line for number, line in lines if line and not line.startswith("#")}
        if not keys:
            raise ConfigError(f"API key file {path}: has no key. Write one per line")
        for number, key in keys.items():
            if len(key) < _LEAST_CHARACTERS or not key.isprintable() or " " in key:
                raise ConfigError(
                    f"API key file {path}, line {number}: a key needs at least {_LEAST_CHARACTERS} characters and no space. "
                    'Create one with: python -c "import secrets; print(secrets.token_urlsafe())"'
                )
        return cls(keys.values())

    def accept(self, headers: Iterable[tuple[bytes | str, bytes | str]]) -> bool:
        """Returns True if any of these headers (or gRPC metadata) has a key.

        They are `Authorization: Bearer KEY` and `X-API-Key: KEY`.
        """
        found = [key for name, value in headers if (key := _key(_bytes(name), _bytes(value))) is not None]
        return any(self._knows(key) for key in found)

    def _knows(self, key: bytes) -> bool:
        """Returns True if `key` is known. Compares all keys, so that the time does not reveal which one is similar."""
        hashed = _hash(key)
        return any([hmac.compare_digest(hashed, known) for known in self._hashes])  # noqa: C419 - a list: compare all


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
