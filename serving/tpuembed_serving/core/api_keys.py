"""API keys from a file, compared in constant time."""

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Self

from tpuembed.errors import ConfigError, reason

__all__ = ["ADMIN_REFUSAL", "KEY_REFUSAL", "UNNAMED", "ApiKeys", "Key", "read_keys"]

KEY_REFUSAL = "no valid API key. Send one as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
"""The error of a request without a key."""
ADMIN_REFUSAL = (
    "this key may not change which models are served. Use a key whose line in --api-key-file is 'NAME admin: KEY'"
)
"""The error of a request that needs an admin's key."""

_LEAST_CHARACTERS = 16
_OWN = "x-api-key"
_BEARER = "bearer "


UNNAMED = "unnamed"
_NAMED = re.compile(r"([\w.-]{1,64})(\s+admin)?:\s+(.*)", re.ASCII)


class Key(NamedTuple):
    """A line of a key file.

    Attributes:
        is_admin: whether the key may change which models are served.
    """

    name: str
    key: str
    is_admin: bool = False


class ApiKeys:
    """A set of keys, each of which allows every request, but only an admin's a reload. Only their hashes are stored.

    Attributes:
        path: the file that they are from; None if they are from none.
    """

    path: Path | None = None

    def __init__(self, keys: Iterable[tuple[str, str] | Key]) -> None:
        """`keys` are (name, key) or Key. Several keys may have one name, such as the old and the new one of a client."""
        self._known = {_hash(key.key.encode()): key._replace(key="") for key in (Key(*each) for each in keys)}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the keys from the file at `path`, each a line of `KEY`, `NAME: KEY` or `NAME admin: KEY`. Empty lines and lines that
        begin with # are skipped.

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
        self._known = type(self)(read_keys(self.path))._known
        return f"API key file {self.path}: read again, {len(self._known)} keys"

    def accept(self, headers: Iterable[tuple[bytes | str, bytes | str]]) -> str | None:
        """Return the name of the first known key in these headers (or gRPC metadata). None if there is none.

        They are `Authorization: Bearer KEY` and `X-API-Key: KEY`. A key without a name is UNNAMED.
        """
        found = self._first(headers)
        return None if found is None else found.name

    def accept_admin(self, headers: Iterable[tuple[bytes | str, bytes | str]]) -> bool:
        """Return True if the first known key, as for `accept`, is an admin's."""
        found = self._first(headers)
        return found is not None and found.is_admin

    def _first(self, headers: Iterable[tuple[bytes | str, bytes | str]]) -> Key | None:
        found = [key for name, value in headers if (key := _key(_bytes(name), _bytes(value))) is not None]
        return next((known for key in found if (known := self._find(key)) is not None), None)

    def _find(self, key: bytes) -> Key | None:
        """Return what is known of a key. Compares all keys, so that the time does not reveal which one is similar."""
        hashed = _hash(key)
        equal = [found for known, found in self._known.items() if hmac.compare_digest(hashed, known)]
        return equal[0] if equal else None


def read_keys(path: Path) -> list[Key]:
    """Return the key of each line of the file at `path`. See `ApiKeys.read`."""
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is not ASCII. Write keys in ASCII"
        raise ConfigError(f"API key file {path}: cannot be read: {why}") from None
    keys: list[Key] = []
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        named = _NAMED.fullmatch(line)
        name, admin, key = named.groups() if named else (UNNAMED, None, line)
        if len(key) < _LEAST_CHARACTERS or not key.isprintable() or " " in key:
            raise ConfigError(
                f"API key file {path}, line {number}: a key needs at least {_LEAST_CHARACTERS} characters and no space. "
                'Create one with: python -c "import secrets; print(secrets.token_urlsafe())"'
            )
        if key in [known.key for known in keys]:
            raise ConfigError(
                f"API key file {path}, line {number}: the key is on a line before, too. Remove one of the two"
            )
        keys.append(Key(name, key, admin is not None))
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
