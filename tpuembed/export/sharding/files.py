"""shards.yaml, which makes one model of the servers of shards, and the configs of these servers."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tpuembed.errors import ConfigError, ExportError, reason
from tpuembed.export.sharding.plan import ShardingPlan
from tpuembed.saved_model import SHARDS_FILE, replace_file

__all__ = ["check_same", "placed_in", "read_shards", "write_shards"]

_FORMAT: Final = 1
"""The format number of a file of lookups of whole tables."""
_FRONT_FORMAT: Final = 2
"""The format number of a file with a front, or with tables whose rows are split. An older server knows neither."""
_ADDRESS: Final = "localhost:{port}"
_FIRST_PORT: Final = 8600
_NOTE: Final = (
    "# Write the address of each shard's servers: a target of gRPC, such as dns:///shard-0:8500. Keep the rest.\n"
)


def read_shards(folder: Path) -> dict[str, Any] | None:
    """Return the content of the folder's shards.yaml; None if there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    path = folder / SHARDS_FILE
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        placed_in(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"shards {path}: cannot be read: {reason(error)}. Restore it, or export into another folder."
        ) from None
    found: dict[str, Any] = content
    return found


def placed_in(content: Mapping[str, Any]) -> list[dict[str, tuple[int, int] | None]]:
    """Return what `placement.weighed` takes: the tables of each shard in a shards.yaml, and which of their rows it has."""
    return [{name: _bounds(shard.get("rows", {}).get(name)) for name in shard["tables"]} for shard in content["shards"]]


def _bounds(given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    start, stop = given
    return int(start), int(stop)


def check_same(folder: Path, content: Mapping[str, Any], plan: ShardingPlan) -> None:
    """Raise ConfigError unless clients of the shards in `folder` can go on with those of `plan`, of the same placement.

    Args:
        folder: of all shards.
        content: of its shards.yaml.
        plan: of an export into it.
    """

    def facts(content: Mapping[str, Any]) -> dict[str, Any]:
        features = {f"the features of {shard['name']}": ", ".join(shard["features"]) for shard in content["shards"]}
        split = {
            f"{key} of feature {name!r}": value
            for name, entry in content.get("split", {}).items()
            for key, value in entry.items()
        }
        padding = {f"the padding of {name!r}": value for name, value in content.get("padding", {}).items()}
        return {**features, "front": content.get("front", "none"), **padding, **split}

    before, now = facts(content), facts(_content("", plan))
    for what in {**now, **before}:
        old, new = before.get(what, "none"), now.get(what, "none")
        if old != new:
            raise ConfigError(
                f"folder {folder}: {what}: its {SHARDS_FILE} has {old}, and the export has {new}. Export into another folder."
            )


def write_shards(folder: Path, plan: ShardingPlan) -> None:
    """Write the configs of the shards' servers, and shards.yaml if it is not there: users write addresses into it.

    Raises:
        ExportError: a file cannot be written.
    """
    for shard in plan.shards:
        _write(folder / f"{shard.name}.config", _models_config(shard.name, folder.absolute() / shard.name))
    if not (folder / SHARDS_FILE).exists():
        _write(folder / SHARDS_FILE, _NOTE + yaml.safe_dump(_content(folder.name, plan), sort_keys=False))


def _content(model: str, plan: ShardingPlan) -> dict[str, Any]:
    shards = []
    for number, shard in enumerate(plan.shards):
        rows = {name: list(bounds) for name, bounds in shard.rows.items()}
        shards.append(
            {
                "name": shard.name,
                "address": _ADDRESS.format(port=_FIRST_PORT + number),
                "tables": list(shard.tables),
                **({"rows": rows} if rows else {}),
                "features": list(shard.features),
                "bytes": shard.bytes,
                "lookups": shard.lookups,
            }
        )
    more: dict[str, Any] = {} if plan.front is None else {"front": plan.front.name}
    if plan.split:
        more["split"] = {name: dataclasses.asdict(feature) for name, feature in plan.split.items()}
    return {
        "format": _FRONT_FORMAT if more else _FORMAT,
        "model": model,
        "shards": shards,
        "padding": dict(plan.padding),
        **more,
    }


def _models_config(name: str, model_dir: Path) -> str:
    return (
        "model_config_list {\n  config {\n"
        f"    name: {json.dumps(name)}\n    base_path: {json.dumps(str(model_dir), ensure_ascii=False)}\n"
        '    model_platform: "tensorflow"\n    model_version_policy { latest { num_versions: 2 } }\n'
        "  }\n}\n"
    )


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise ExportError(f"{path}: cannot be written: {reason(error)}.") from None
