"""Reads a shards.yaml: the servers that look up some of the features each, and are one model together."""

import dataclasses
import ipaddress
import re
import ssl
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tpuembed.errors import ConfigError, one_line, reason
from tpuembed.files import FilePath, as_path
from tpuembed_serving.core.api_keys import read_keys
from tpuembed_serving.core.tls import load_authorities, load_pair

__all__ = ["Shard", "ShardsFile", "ShardsSecrets", "ShardsTls", "SplitLookup"]

_FORMATS: Final = (1, 2)
"""2 has fronts and split tables."""
_PADDING: Final = int | float | str
_KEYS: Final = (
    *("format", "model", "shards", "padding", "front", "split", "on_failure", "tls", "api_key_file"),
    "redis_password_file",
)
_KEYS_OF_EXPORTS: Final = ("tables", "features", "bytes", "lookups", "rows")
_KEYS_OF_SERVERS: Final = ("name", "address", *_KEYS_OF_EXPORTS)
_KEYS_OF_REDIS: Final = ("kind", "name", "url", *_KEYS_OF_EXPORTS)
_OTHER_TARGETS: Final = ("unix", "unix-abstract", "vsock", "xds", "google-c2p")
"""Schemes of gRPC's targets (doc/naming.md of gRPC) of which nothing is checked."""
_HOST_AND_PORT: Final = re.compile(r"(?P<host>[^\s:/,\[\]]+|\[[0-9a-fA-F:.]+(?:%\w+)?\]):(?P<port>\d{1,5}|https?)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """A server, or its replicas; or a model in Redis.

    Attributes:
        name: of its model.
        address: a target of gRPC, such as HOST:PORT, dns:///NAME:PORT, or ipv4:ADDRESS:PORT,ADDRESS:PORT for replicas.
        url: of Redis, redis://HOST:PORT. Empty for servers.
        features: that it answers; empty if the file does not list them.
    """

    name: str
    address: str = ""
    url: str = ""
    features: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitLookup:
    """A feature whose table is divided among several shards by rows. Each is asked all ids, and their answers are added.

    The shards take ids outside their rows as zeros. So the ids are checked before they are sent.

    Attributes:
        table: its name.
        rows: of the whole table.
        out_of_vocabulary: "error", "zeros", or the row that other ids become.
        input: "id", every element is an id, or "ids", lists that are padded with -1.
        max_sequence_length: only so many ids of a list are looked up; 0 is all.
        drops_negative: whether ids below -1 in lists are dropped as padding is.
        weighted: whether it has weights, in the input of its name with `_weights` behind it.
    """

    table: str
    rows: int
    out_of_vocabulary: str | int
    input: str
    max_sequence_length: int = 0
    drops_negative: bool = False
    weighted: bool = False

    @property
    def is_possible(self) -> bool:
        """Return True if each value is of its type, and in its range."""
        kinds = {"table": str, "rows": int, "max_sequence_length": int, "drops_negative": bool, "weighted": bool}
        if any(type(getattr(self, name)) is not kind for name, kind in kinds.items()):
            return False
        policy: Any = self.out_of_vocabulary
        is_policy = policy in ("error", "zeros") or (type(policy) is int and 0 <= policy < self.rows)
        return is_policy and self.input in ("id", "ids") and self.rows > 0 and self.max_sequence_length >= 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardsTls:
    """How shards are called over TLS. The files are in PEM format.

    Attributes:
        ca: certificates of authorities. The shards' certificates must be of one of them.
        certificate, key: the certificate to show to shards that ask for one; None for both shows none.
        server_name: the name in the shards' certificates; None is the host of each address.
    """

    ca: Path
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files."""
        return tuple(path for path in (self.ca, self.certificate, self.key) if path is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardsSecrets:
    """What the files of a ShardsFile have: certificates and keys.

    Attributes:
        ca, certificate, key: those of its ShardsTls; None without it.
        api_key: the key that the shards ask for; None sends none.
    """

    ca: bytes | None = None
    certificate: bytes | None = dataclasses.field(default=None, repr=False)
    key: bytes | None = dataclasses.field(default=None, repr=False)
    api_key: str | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardsFile:
    """What a shards.yaml says.

    Attributes:
        path: of the file.
        model: the name of the model that all shards are together.
        shards: in their order in the file.
        padding: the value that fills up rows of different lengths in JSON, by input.
        front: the MODEL_DIR of a whole model's dense part, a folder or a URL; None if the shards' outputs are the answer.
        split: the features of tables that are divided by rows.
        zeros: the features that become zeros if their shard does not answer. Requests with others fail then.
        tls: None is plain text.
        api_key_file: has the key that the shards ask for; None sends none.
        redis_password_file: has the password of Redis; None is that of the environment.
    """

    path: Path
    model: str
    shards: tuple[Shard, ...]
    padding: Mapping[str, int | float | str] = dataclasses.field(default_factory=dict)
    front: FilePath | None = None
    split: Mapping[str, SplitLookup] = dataclasses.field(default_factory=dict)
    zeros: frozenset[str] = frozenset()
    tls: ShardsTls | None = None
    api_key_file: Path | None = None
    redis_password_file: Path | None = None

    @classmethod
    def read(cls, path: Path) -> "ShardsFile":
        """Read a file that `tpuembed export --shards` wrote, with the addresses of the servers.

        Raises:
            ConfigError: it, a certificate or a key cannot be read, or a field is missing, unknown or wrong.
        """
        where = f"shards {path}"
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: cannot be read: {reason(error)}.") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{where}: {_yaml_fault(error)}. Correct it.") from None
        if not isinstance(content, dict) or content.get("format") not in _FORMATS:
            found = content.get("format") if isinstance(content, dict) else content
            known = " and ".join(map(str, _FORMATS))
            raise ConfigError(f"{where}: format is {found!r}, and this release reads {known}. Export the shards again.")
        _check_keys(where, content, _KEYS)
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
        paths = {key: content.get(key) for key in ("front", "api_key_file", "redis_password_file")}
        for key, value in paths.items():
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{where}: {key} must be a path, got {value!r}.")
        front, key_file, password_file = paths.values()
        found = cls(
            path=path,
            model=model,
            shards=shards,
            padding=padding,
            zeros=_zeros(where, content.get("on_failure"), entries),
            tls=_tls(where, content.get("tls"), path.parent),
            front=None if front is None else as_path(front if "://" in front else path.absolute().parent / front),
            api_key_file=None if key_file is None else path.parent / key_file,
            redis_password_file=None if password_file is None else path.parent / password_file,
            split=_split(where, content.get("split"), entries),
        )
        found.secrets()
        if found.redis_password_file is not None:
            from tpuembed.row_store.client import password_of  # imports NumPy

            password_of(found.redis_password_file)
        return found

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """Return the files of certificates and keys."""
        return (*(self.tls.files if self.tls else ()), *([self.api_key_file] if self.api_key_file else []))

    def secrets(self) -> ShardsSecrets:
        """Return what the files of certificates and keys have now.

        Raises:
            ConfigError: one cannot be read, or has another content.
        """
        api_key = None if self.api_key_file is None else read_keys(self.api_key_file)[0].key
        if self.tls is None:
            return ShardsSecrets(api_key=api_key)
        tls, where = self.tls, f"shards {self.path}: tls"
        found = {}
        for name, path in (("ca", tls.ca), ("certificate", tls.certificate), ("key", tls.key)):
            try:
                found[name] = None if path is None else path.read_bytes()
            except OSError as error:
                raise ConfigError(f"{where}: {name} {path} cannot be read: {reason(error)}.") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_authorities(context, tls.ca, f"{where}: ca")
        if tls.certificate is not None and tls.key is not None:
            load_pair(context, tls.certificate, tls.key, f"{where}: certificate")
        return ShardsSecrets(**found, api_key=api_key)


def _split(where: str, entry: Any, shards: Sequence[Mapping[str, Any]]) -> dict[str, SplitLookup]:
    """Return the features of split tables. `shards` have the rows of each part, which together must be the whole table."""
    found = {}
    for name, value in (entry if isinstance(entry, dict) else {"": entry} if entry is not None else {}).items():
        try:
            feature = found[name] = SplitLookup(**value)
        except TypeError:
            feature = None
        if feature is None or not feature.is_possible:
            raise ConfigError(f"{where}: split of {name!r} is {value!r}. Take it from the file that the export wrote.")
        parts = sorted(shard["rows"][feature.table] for shard in shards if feature.table in shard.get("rows", ()))
        starts, stops = [start for start, _ in parts], [stop for _, stop in parts]
        if [*starts, feature.rows] != [0, *stops]:
            raise ConfigError(
                f"{where}: table {feature.table!r} has {feature.rows} rows, and the shards have {parts}. Each row must be on one "
                "shard. Take the shards from the file that the export wrote."
            )
    return found


def _yaml_fault(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"is no YAML: {one_line(error)}"
    return f"is no YAML: line {error.problem_mark.line + 1}: {error.problem}"


def _check_keys(where: str, entry: Iterable[Any], known: Iterable[str]) -> None:
    if set(entry) - set(known):
        from tpuembed.config.checks import check_keys  # imports NumPy

        check_keys(where, dict.fromkeys(entry), known)


def _zeros(where: str, entry: Any, shards: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return the features that become zeros. `shards` may list the features of each."""
    if entry is None:
        return frozenset()
    if not isinstance(entry, dict) or not set(map(str, entry.values())) <= {"error", "zeros"}:
        raise ConfigError(f"{where}: on_failure must give features error or zeros, got {entry!r}.")
    zeros = frozenset(name for name, value in entry.items() if value == "zeros")
    known = {name for shard in shards for name in shard.get("features", ())}
    unknown = sorted(map(str, entry.keys() - known))
    if unknown and all("features" in shard for shard in shards):
        from tpuembed.config.checks import did_you_mean  # imports NumPy

        raise ConfigError(
            f"{where}: on_failure names {unknown[0]!r}, which is no feature of a shard; {did_you_mean(unknown[0], known)}"
        )
    for shard in shards:
        features = set(shard.get("features", ()))
        if (chosen := features & zeros) and (others := features - zeros):
            raise ConfigError(
                f"{where}: on_failure of {', '.join(sorted(chosen))} is zeros, but not that of {', '.join(sorted(others))}, on the "
                f"same shard {shard['name']}. Give all features of a shard the same."
            )
    return zeros


def _tls(where: str, entry: Any, folder: Path) -> ShardsTls | None:
    if entry is None:
        return None
    if not isinstance(entry, dict) or not set(map(type, entry.values())) <= {str}:
        raise ConfigError(f"{where}: tls must be a mapping of texts, got {entry!r}.")
    _check_keys(f"{where}: tls", entry, ("ca", "certificate", "key", "server_name"))
    if "ca" not in entry or ("certificate" in entry) != ("key" in entry):
        raise ConfigError(f"{where}: tls needs ca, and takes certificate and key together. It has {', '.join(entry)}.")
    paths = {name: folder / entry[name] for name in ("ca", "certificate", "key") if name in entry}
    return ShardsTls(**paths, server_name=entry.get("server_name"))


def _shard(where: str, entry: Any) -> Shard:
    if isinstance(entry, dict) and entry.keys() & {"kind", "url"}:
        if not entry.keys() & {"address"}:
            _check_keys(where, entry, _KEYS_OF_REDIS)
        keys, kind = sorted(map(str, entry)), entry.get("kind")
        texts = all(isinstance(entry.get(key), str) and entry[key] for key in ("kind", "name", "url"))
        if "address" in entry or kind != "redis" or not texts:
            raise ConfigError(
                f"{where}: must have the keys kind: redis, name and url, got kind {kind!r} and {', '.join(keys)}."
            )
        from tpuembed.row_store.client import check_url  # imports NumPy

        try:
            check_url(entry["url"])
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        return Shard(name=entry["name"], url=entry["url"], features=_exported(where, entry))
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be a mapping with the keys name and address, got {entry!r}.")
    _check_keys(where, entry, _KEYS_OF_SERVERS)
    for key in ("name", "address"):
        if not isinstance(entry.get(key), str) or not entry[key]:
            raise ConfigError(f"{where}: {key} must be a text, got {entry.get(key)!r}. Write the {key} of its servers.")
    features = _exported(where, entry)
    if not _is_target(entry["address"]):
        raise ConfigError(
            f"{where}: address {entry['address']!r} is no target of gRPC with a port. Write HOST:PORT, dns:///HOST:PORT, or "
            "ipv4:IP:PORT,IP:PORT."
        )
    return Shard(name=entry["name"], address=entry["address"], features=features)


def _exported(where: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Check what the export wrote of a shard. Returns its features."""
    features, rows = entry.get("features", []), entry.get("rows", {})
    if not isinstance(features, list) or not all(isinstance(name, str) for name in features):
        raise ConfigError(f"{where}: features must be a list of names, got {features!r}.")
    parts = rows.values() if isinstance(rows, dict) else [None]
    if not all(isinstance(part, list) and [*map(type, part)] == [int, int] for part in parts):
        text = "rows must give each split table its first row and the row after its last"
        raise ConfigError(f"{where}: {text}, got {rows!r}. Take them from the file that the export wrote.")
    return tuple(features)


def _is_target(address: str) -> bool:
    """Returns True if gRPC can connect to `address`, and it names a port."""
    scheme, colon, rest = address.partition(":")
    match scheme.lower() if colon else "":
        case "ipv4":
            return all(_is_numeric(each, ipaddress.IPv4Address) for each in rest.split(","))
        case "ipv6":
            return all(_is_numeric(each, ipaddress.IPv6Address) for each in rest.split(","))
        case "dns":
            return _host_of(re.sub(r"^//[^/]*/|^/", "", rest)) is not None
        case other if other in _OTHER_TARGETS:
            return bool(rest.strip("/"))
    return _host_of(address) is not None


def _is_numeric(address: str, kind: type[ipaddress.IPv4Address | ipaddress.IPv6Address]) -> bool:
    host = _host_of(address)
    try:
        return host is not None and bool(kind(host.strip("[]").replace("%25", "%")))
    except ValueError:
        return False


def _host_of(address: str) -> str | None:
    """Return the host of HOST:PORT; None if `address` is something else."""
    found = _HOST_AND_PORT.fullmatch(address)
    if found is None or (found["port"].isdigit() and not 0 < int(found["port"]) < 1 << 16):
        return None
    return found["host"]
