"""What Redis has of a model: one hash, `tpuembed:MODEL`, whose fields change together by one command.

- `current`: the number of the version to serve.
- `version:N`: a VersionRecord, the manifest of the version.
- `digest:N`: the digest of version N, also after its removal. A number never gets another content.
- `array:ID`: an ArrayRecord, the rows with keys of this ID, and how many of them are written.
- `writer`: a text of the publish that began last. The others can change nothing here any more.
"""

import dataclasses
import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from tpuembed.errors import ExportError, RowStoreDataError
from tpuembed.manifest import ArrayEntry, Manifest, StackEntry
from tpuembed.row_store.client import RowStore
from tpuembed.row_store.keys import ArrayKeys, check_model

__all__ = ["PIECE_BYTES", "ArrayRecord", "PublishedModel", "VersionRecord", "records_of"]

T = TypeVar("T")

_FORMAT: Final = 1
PIECE_BYTES: Final = 1 << 20
"""Bytes of a piece of the index of an overlay. Servers read it whole, so it is not stored by rows."""
_SECONDS: Final = 30.0
_CHANGE: Final = """
if redis.call('HGET', KEYS[1], 'writer') ~= ARGV[1] then return -1 end
return redis.call(ARGV[2], KEYS[1], unpack(ARGV, 3))
"""
"""Changes the hash, unless another publish has begun: one that was stopped for long may have lost its lease."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """An array of rows in Redis. Its key in the hash is derived from all fields but `written` and `written_crc32c`.

    Attributes:
        rows: the number of its values.
        row_bytes: the length of each value; of an index of an overlay, the longest.
        size, crc32c: of all bytes.
        written: the values [0, written) are in Redis.
        written_crc32c: of them.
    """

    rows: int
    row_bytes: int
    size: int
    crc32c: int
    written: int = 0
    written_crc32c: int = 0

    @property
    def id(self) -> str:
        """Return the text that names the array in keys."""
        content = json.dumps([self.rows, self.row_bytes, self.size, self.crc32c])
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def is_whole(self) -> bool:
        """Returns True if all rows are written."""
        return self.written == self.rows

    @property
    def emptied(self) -> "ArrayRecord":
        """Return the record of the same array without any row."""
        return dataclasses.replace(self, written=0, written_crc32c=0)

    def to_json(self) -> str:
        """Return the record as it is stored."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Return a record. Raises ValueError, TypeError or KeyError if `text` is none."""
        return cls(**{field.name: int(json.loads(text)[field.name]) for field in dataclasses.fields(cls)})


def records_of(stack: StackEntry) -> dict[str, ArrayRecord]:
    """Return the record of each array of a stack, by the array's name: its own rows, and the rows and the index of an overlay."""
    own, *more = stack.arrays
    found = {own.name: _record(own, stack.row_bytes)}
    if more:
        rows, words = more
        found[rows.name] = _record(rows, stack.row_bytes)
        found[words.name] = dataclasses.replace(
            _record(words, min(words.size, PIECE_BYTES)), rows=-(-words.size // PIECE_BYTES)
        )
    return found


def _record(array: ArrayEntry, row_bytes: int) -> ArrayRecord:
    return ArrayRecord(rows=array.rows, row_bytes=row_bytes, size=array.size, crc32c=array.crc32c)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VersionRecord:
    """A version in Redis.

    Attributes:
        number: of the version.
        published: when, in seconds since 1970.
        text: of the manifest, as the export wrote it.
        manifest: of the version.
    """

    number: int
    published: float
    text: str
    manifest: Manifest

    @property
    def digest(self) -> str:
        """Return a text that differs for another manifest. It is the same in all releases."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def arrays(self) -> dict[str, ArrayRecord]:
        """Return the arrays of all stacks, by name."""
        return {name: record for stack in self.manifest.stacks for name, record in records_of(stack).items()}

    def to_json(self) -> str:
        """Return the record as it is stored."""
        return json.dumps(
            {"format": _FORMAT, "published": self.published, "digest": self.digest, "manifest": self.text}
        )


class _ManifestText:
    """The folder of a manifest that is a text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __truediv__(self, _: Path) -> "_ManifestText":
        return self

    def read_text(self, encoding: str) -> str:  # noqa: ARG002 - as pathlib.Path
        return self._text

    def __str__(self) -> str:
        return "in Redis"


class PublishedModel:
    """The hash of one model."""

    def __init__(self, store: RowStore, name: str, timeout_seconds: float = _SECONDS) -> None:
        """Ask `store` for the model called `name`. Each question has `timeout_seconds`."""
        self.store, self.name, self.key = store, check_model(name), f"tpuembed:{name}"
        self._timeout_seconds = timeout_seconds
        self._writer = ""

    def begin(self) -> None:
        """Be the one that may change the records from now on: a publish that has the lease."""
        self._writer = uuid.uuid4().hex
        self._ask("HSET", "writer", self._writer)

    def keys_of(self, array: ArrayRecord) -> ArrayKeys:
        """Return the keys of an array's rows."""
        return ArrayKeys(self.name, array.id)

    def current(self) -> int | None:
        """Return the number of the current version; None if there is none."""
        found = self._ask("HGET", "current")
        return None if found is None else self._parsed("current", found, int)

    def numbers(self) -> list[int]:
        """Return the versions in Redis, in order."""
        fields: Iterable[bytes] = self._ask("HKEYS")
        return sorted(int(field[8:]) for field in fields if field.startswith(b"version:") and field[8:].isdigit())

    def digest(self, number: int) -> str | None:
        """Return the digest of the version that has or had this number; None if none had it."""
        found: bytes | None = self._ask("HGET", f"digest:{number}")
        return None if found is None else found.decode(errors="replace")

    def version(self, number: int) -> VersionRecord | None:
        """Return the record of a version; None if there is none.

        Raises:
            RowStoreDataError: it is damaged, or of a newer release.
        """
        found = self._ask("HGET", f"version:{number}")
        return None if found is None else self._parsed(f"version:{number}", found, lambda text: _version(number, text))

    def arrays(self) -> dict[str, ArrayRecord]:
        """Return all arrays, by ID."""
        fields = self._ask("HKEYS")
        ids = [field[6:].decode() for field in fields if field.startswith(b"array:")]
        return {id_: record for id_ in ids if (record := self.array(id_)) is not None}

    def array(self, id_: str) -> ArrayRecord | None:
        """Return the record of an array; None if there is none."""
        found = self._ask("HGET", f"array:{id_}")
        return None if found is None else self._parsed(f"array:{id_}", found, ArrayRecord.from_json)

    def put_array(self, record: ArrayRecord) -> None:
        """Write the record of an array; see `_change`."""
        self._change("HSET", f"array:{record.id}", record.to_json())

    def put_current(self, record: VersionRecord) -> None:
        """Write a version's record and make it the current one, by one command; see `_change`."""
        number = record.number
        self._change(
            "HSET", f"version:{number}", record.to_json(), f"digest:{number}", record.digest, "current", number
        )

    def remove(self, *fields: str) -> None:
        """Remove fields of the hash; see `_change`."""
        self._change("HDEL", *fields)

    def check_writer(self) -> None:
        """Raise ExportError if another publish has begun since."""
        self._change("HSET", "writer", self._writer)

    def _change(self, verb: str, *words: Any) -> None:
        """Change the hash.

        Raises:
            ExportError: another publish has begun since. Nothing has changed.
        """
        if (
            self.store.ask(
                "EVAL", _CHANGE, 1, self.key, self._writer, verb, *words, timeout_seconds=self._timeout_seconds
            )
            == -1
        ):
            raise ExportError(
                f"Redis at {self.store.url}: another process has begun to publish model {self.name}, because this one had stopped "
                "for longer than its lease, or Redis was emptied. Publish again."
            )

    def _ask(self, verb: str, *words: Any) -> Any:
        return self.store.ask(verb, self.key, *words, timeout_seconds=self._timeout_seconds)

    def _parsed(self, field: str, text: bytes, parse: Callable[[bytes], T]) -> T:
        try:
            return parse(text)
        except KeyError as error:
            fault = f"it lacks {error}"
        except (ValueError, TypeError) as error:  # ConfigError of a manifest too
            fault = str(error).rstrip(".")
        raise RowStoreDataError(f"Redis at {self.store.url}: {self.key} {field} is damaged: {fault}. Publish again.")


def _version(number: int, stored: bytes) -> VersionRecord:
    value: Mapping[str, Any] = json.loads(stored)
    if value["format"] != _FORMAT:
        raise ValueError(f"its format is {value['format']!r}, and this release reads {_FORMAT}")
    text = str(value["manifest"])
    manifest = Manifest.read(_ManifestText(text))
    assert manifest is not None
    record = VersionRecord(number=number, published=float(value["published"]), text=text, manifest=manifest)
    if record.digest != value["digest"]:
        raise ValueError(f"its digest is {value['digest']}, but that of its manifest is {record.digest}")
    return record
