"""API keys from a file, compared in constant time."""

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from tpuembed.errors import ConfigError, reason

__all__ = ["KEY_REFUSAL", "UNNAMED", "ApiKeys", "read_keys"]

KEY_REFUSAL = "no valid API key. Send one as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
"""The error of a request without a key."""

_LEAST_CHARACTERS = 16
_OWN = "x-api-key"
_BEARER = "bearer "


UNNAMED = "unnamed"
_NAMED = re.compile(r"([\w.-]{1,64}):\s+(.*)", re.ASCII)


class ApiKeys:
    """A set of keys, each of which allows every request. Only their hashes are stored.

    Attributes:
        path: the file that they are from; None if they are from none.
    """

    path: Path | None = None

    def __init__(self, keys: Iterable[tuple[str, str]]) -> None:
        """`keys` are (name, key). Several keys may have one name, such as the old and the new one of a client."""
        self._names = {_hash(key.encode()): name for name, key in keys}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the keys from the file at `path`, each a line of `KEY` or `NAME: KEY`. Empty lines and lines that begin with # are
        skipped.

        Raises:
            ConfigError: the file cannot be read or has no key, or a key is too short or has a space.
        """
        keys = cls(read_keys(path))
        keys.path = path
        return keys

    def reload(self) -> str:
        """Read the file again. Return the line to log.

        Raises:
            ConfigError: as for `read`. The keys of before stay.
        """
        assert self.path is not None
        self._names = type(self)(read_keys(self.path))._names
        return f"API key file {self.path}: read again, {len(self._names)} keys"

    def accept(self, headers: Iterable[tuple[bytes | str, bytes | str]]) -> str | None:
        """Return the name of the first known key in these headers (or gRPC metadata). None if there is none.

        They are `Authorization: Bearer KEY` and `X-API-Key: KEY`. A key without a name is UNNAMED.
        """
        found = [key for name, value in headers if (key := _key(_bytes(name), _bytes(value))) is not None]
        return next((name for key in found if (name := self._name(key)) is not None), None)

    def _name(self, key: bytes) -> str | None:
        """Return the name of a key. Compares all keys, so that the time does not reveal which one is similar."""
        hashed = _hash(key)
        equal = [name for known, name in self._names.items() if hmac.compare_digest(hashed, known)]
        return equal[0] if equal else None


def read_keys(path: Path) -> list[tuple[str, str]]:
    """Return (name, key) of each line of the file at `path`. See `ApiKeys.read`."""
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is not ASCII. Write keys in ASCII"
        raise ConfigError(f"API key file {path}: cannot be read: {why}") from None
    keys = []
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        named = _NAMED.fullmatch(line)
        name, key = named.groups() if named else (UNNAMED, line)
        if len(key) < _LEAST_CHARACTERS or not key.isprintable() or " " in key:
            raise ConfigError(
                f"API key file {path}, line {number}: a key needs at least {_LEAST_CHARACTERS} characters and no space. "
                'Create one with: python -c "import secrets; print(secrets.token_urlsafe())"'
            )
        keys.append((name, key))
    if not keys:
        raise ConfigError(f"API key file {path}: has no key. Write one per line")
    return keys


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
