"""Reads a shards.yaml: the servers that look up some of the features each, and are one model together."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tpuembed.errors import ConfigError, one_line, reason

__all__ = ["Shard", "ShardsFile"]

_FORMAT: Final = 1
_PADDING: Final = int | float | str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """A server, or its replicas; or a model in Redis.

    Attributes:
        name: of its model.
        address: a target of gRPC, such as HOST:PORT, dns:///NAME:PORT, or ipv4:ADDRESS:PORT,ADDRESS:PORT for replicas.
        url: of Redis, redis://HOST:PORT. Empty for servers.
    """

    name: str
    address: str = ""
    url: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardsFile:
    """What a shards.yaml says.

    Attributes:
        path: of the file.
        model: the name of the model that all shards are together.
        shards: in their order in the file.
        padding: the value that fills up rows of different lengths in JSON, by input.
    """

    path: Path
    model: str
    shards: tuple[Shard, ...]
    padding: Mapping[str, int | float | str] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "ShardsFile":
        """Read a file that `tpuembed export --shards` wrote, with the addresses of the servers.

        Raises:
            ConfigError: it cannot be read, or a key is missing, unknown or wrong.
        """
        where = f"shards {path}"
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: cannot be read: {reason(error)}.") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{where}: is no YAML: {one_line(error)}. Correct it.") from None
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            found = content.get("format") if isinstance(content, dict) else content
            raise ConfigError(
                f"{where}: format is {found!r}, and this release reads {_FORMAT}. Export the shards again."
            )
        unknown = content.keys() - {"format", "model", "shards", "padding"}
        if unknown:
            raise ConfigError(f"{where}: has no key {min(map(str, unknown))!r}. Remove it.")
        model, entries, padding = content.get("model"), content.get("shards"), content.get("padding") or {}
        if not isinstance(model, str) or not model:
            raise ConfigError(f"{where}: model must be a name, got {model!r}.")
        if not isinstance(entries, list) or not entries:
            raise ConfigError(f"{where}: shards must be a list with one entry or more, got {entries!r}.")
        if not isinstance(padding, dict) or not all(isinstance(value, _PADDING) for value in padding.values()):
            raise ConfigError(f"{where}: padding must give each input a number or a text, got {padding!r}.")
        shards = tuple(_shard(f"{where}: shard {number}", entry) for number, entry in enumerate(entries))
        names = [shard.name for shard in shards]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"{where}: two shards are called {twice[0]!r}. Rename one.")
        return cls(path=path, model=model, shards=shards, padding=padding)


def _shard(where: str, entry: Any) -> Shard:
    if isinstance(entry, dict) and entry.keys() & {"kind", "url"}:
        keys, kind = sorted(map(str, entry)), entry.get("kind")
        texts = all(isinstance(text, str) and text for text in entry.values())
        if keys != ["kind", "name", "url"] or kind != "redis" or not texts:
            raise ConfigError(
                f"{where}: must have the keys kind: redis, name and url, got kind {kind!r} and {', '.join(keys)}."
            )
        return Shard(name=entry["name"], url=entry["url"])
    known = {"name", "address", "tables", "features", "bytes", "lookups"}
    if not isinstance(entry, dict) or entry.keys() - known:
        raise ConfigError(f"{where}: must be a mapping with the keys name and address, got {entry!r}.")
    for key in ("name", "address"):
        if not isinstance(entry.get(key), str) or not entry[key]:
            raise ConfigError(f"{where}: {key} must be a text, got {entry.get(key)!r}. Write the {key} of its servers.")
    return Shard(name=entry["name"], address=entry["address"])
