"""Which versions of a MODEL_DIR are in use: by a models.config, or by running servers of TensorFlow Serving's REST API."""

import dataclasses
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from tpuembed.errors import ConfigError, ServingError
from tpuembed_serving.models.config import read_models
from tpuembed_serving.settings import ModelSettings

__all__ = ["VersionUse", "find_uses", "versions_in_use"]

_SECONDS: Final = 10
_REFUSED: Final = (401, 403)


@dataclasses.dataclass(frozen=True)
class VersionUse:
    """One use of a version.

    Attributes:
        version: its number.
        reason: who uses it, and how.
        label: the label that names it; empty for another use.
    """

    version: int
    reason: str
    label: str = ""


def versions_in_use(
    model_dir: Path,
    versions: Collection[int],
    *,
    configs: Iterable[Path] = (),
    servers: Iterable[str] = (),
    model: str | None = None,
    api_key: str | None = None,
) -> dict[int, str]:
    """Return those of `versions` that are in use, each with the reasons. See `tpuembed.prune_versions`.

    A config uses the versions that its policy selects, and those that have a label. A server uses the versions that it
    loads, serves or unloads, by its own status.

    Args:
        model_dir: the folder of the versions.
        versions: those that exist.
        configs: files such as models.config.
        servers: URLs such as http://HOST:PORT, or http://HOST:PORT/v1/models/NAME. Name every server: one behind a load
            balancer is not asked.
        model: the name of the model. None: in a config, the models whose base_path is `model_dir`; at a server, the name
            of that folder.
        api_key: for the servers.

    Raises:
        ConfigError: a config cannot be read or has no such model, or a URL is none of these.
        ServingError: a server does not answer, or has no such model.
    """
    reasons: dict[int, list[str]] = {}
    for use in find_uses(model_dir, versions, configs, servers, model, api_key):
        reasons.setdefault(use.version, []).append(use.reason)
    return {version: ", ".join(found) for version, found in reasons.items()}


def find_uses(
    model_dir: Path,
    versions: Collection[int],
    configs: Iterable[Path] = (),
    servers: Iterable[str] = (),
    model: str | None = None,
    api_key: str | None = None,
) -> list[VersionUse]:
    """Return the uses of `versions`. See `versions_in_use`."""
    for name, given in (("model", model), ("api_key", api_key)):
        if given is not None and not (servers or (configs and name == "model")):
            others = "a config or a server" if name == "model" else "a server"
            raise ConfigError(f"{name}=: it says how to ask {others}, and none was given. Give one, or leave it out.")
    found = [use for config in configs for use in _configured(config, model_dir, versions, model)]
    name = model or model_dir.absolute().name
    found += [use for server in servers for use in _served(server, name, api_key)]
    return [use for use in found if use.version in versions]


def _configured(config: Path, model_dir: Path, versions: Collection[int], model: str | None) -> Iterator[VersionUse]:
    models = read_models(config)
    mine = [one for one in models if (one.name == model if model else _is_at(one, model_dir))]
    if not mine:
        there = ", ".join(f"{one.name} at {one.base_path}" for one in models) or "none"
        wanted = f"called {model}" if model else f"whose base_path is {model_dir.absolute()}"
        raise ConfigError(f"config {config}: has no model {wanted}. Name one of its models: {there}.")
    for one in mine:
        for version in sorted(one.policy.wanted(versions)):
            yield VersionUse(version, f"policy of {one.name} in {config}")
        for label, version in one.labels.items():
            yield VersionUse(version, f"label {label} of {one.name} in {config}", label)


def _is_at(model: ModelSettings, model_dir: Path) -> bool:
    return isinstance(model.base_path, Path) and model.base_path.resolve() == model_dir.resolve()


def _served(server: str, name: str, api_key: str | None) -> Iterator[VersionUse]:
    for status in _statuses(server, name, api_key):
        if status["state"] != "END":
            yield VersionUse(int(status["version"]), f"{status['state']} at {server}")


def _statuses(server: str, name: str, api_key: str | None) -> list[dict[str, str]]:
    """Return what GET /v1/models/NAME answers: ModelVersionStatus of TensorFlow Serving's get_model_status.proto."""
    try:
        parts = urllib.parse.urlsplit(server)
    except ValueError:
        parts = urllib.parse.urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"server {server!r}: is no URL of a server. Write http://HOST:PORT of its REST API.")
    path = parts.path if parts.path.strip("/") else f"/v1/models/{urllib.parse.quote(name)}"
    request = urllib.request.Request(urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, "", "")))
    if api_key is not None:
        request.add_unredirected_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as reply:
            found: list[dict[str, str]] = json.load(reply)["model_version_status"]
            return [{"state": str(one["state"]), "version": str(int(one["version"]))} for one in found]
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in _REFUSED:
            raise ServingError(f"server {server}: asks for an API key ({error.code}). Pass api_key.") from None
        why = f"{path} answers {error.code}"
    except (OSError, http.client.HTTPException) as error:
        why = f"cannot be asked: {getattr(error, 'reason', None) or error}"
    except (ValueError, KeyError, TypeError):
        why = f"{path} answers no status of versions"
    raise ServingError(f"server {server}: {why}. Check the URL and the name of the model: {name}.") from None
