"""Exports lookups as several MODEL_DIRs, each with some of the tables, and the file that makes one model of their servers."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tpuembed.checkpoint import open_checkpoint
from tpuembed.config import ServingConfig
from tpuembed.config.checks import check_count
from tpuembed.errors import ConfigError, ExportError, reason
from tpuembed.export.formatting import format_bytes
from tpuembed.export.graph.signature import ServedFeature, serving_config_of
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan.request import LookupRequest
from tpuembed.export.report import ExportReport
from tpuembed.export.retention.listing import version_folders
from tpuembed.export.run import Progress, make_plan
from tpuembed.export.sharding.placement import TableLoad, place
from tpuembed.files import FilePath, as_path
from tpuembed.manifest import Manifest
from tpuembed.saved_model import replace_file

__all__ = ["SHARDS_FILE", "ShardEntry", "ShardingPlan", "ShardingReport", "export_shards", "plan_shards"]

SHARDS_FILE: Final = "shards.yaml"
_FORMAT: Final = 1
_WITHOUT: Final = ("rows", "base", "max_overlay", "delta_to", "sign_key")
"""Options of an export that one of shards does not take."""
_ADDRESS: Final = "localhost:{port}"
_FIRST_PORT: Final = 8600
_NOTE: Final = (
    "# Write the address of each shard's servers: a target of gRPC, such as dns:///shard-0:8500. Keep the rest.\n"
)


@dataclasses.dataclass(frozen=True)
class ShardEntry:
    """One shard.

    Attributes:
        name: of its MODEL_DIR and its model.
        tables, features: those that it has.
        bytes: of its tables, as they are stored.
        lookups: rows that an example looks up in it.
    """

    name: str
    tables: tuple[str, ...]
    features: tuple[str, ...]
    bytes: int
    lookups: int


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """Which shard has what.

    Attributes:
        shards: in their order.
        padding: the value that fills up lists in requests, by input.
    """

    shards: tuple[ShardEntry, ...]
    padding: Mapping[str, int | str]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {"shards": [dataclasses.asdict(shard) for shard in self.shards], "padding": dict(self.padding)}

    def describe(self) -> str:
        """Return the plan as lines of text."""
        lines = [f"{len(self.shards)} shards"]
        for shard in self.shards:
            size, tables = format_bytes(shard.bytes), ", ".join(shard.tables)
            lines.append(f"  {shard.name}: {size}, {shard.lookups} lookups of an example, tables {tables}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class ShardingReport:
    """The result of `export_shards`.

    Attributes:
        path: the folder of all shards.
        version: the number that each shard's version has.
        shards: what each has.
        reports: of the exports that were made, by shard. An interrupted run had made the others.
    """

    path: Path
    version: int
    shards: tuple[ShardEntry, ...]
    reports: Mapping[str, ExportReport]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "path": str(self.path),
            "version": self.version,
            "shards": [dataclasses.asdict(shard) for shard in self.shards],
            "reports": {name: report.to_dict() for name, report in self.reports.items()},
        }


def plan_shards(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    serving_config: Any = None,
    shards: int | None = None,
    shard_bytes: int | None = None,
    ids_per_list: Mapping[str, int] | None = None,
    checkpoint_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ShardingPlan:
    """Return which tables `export_shards` would put on which shard. Nothing is written. See `export_shards`."""
    return _planned(checkpoint, folder, serving_config, shards, shard_bytes, ids_per_list, checkpoint_options, options)[
        0
    ]


def export_shards(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    serving_config: Any = None,
    shards: int | None = None,
    shard_bytes: int | None = None,
    ids_per_list: Mapping[str, int] | None = None,
    on_progress: Progress | None = None,
    checkpoint_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ShardingReport:
    """Write a version of each shard into `folder`/shard-0/, `folder`/shard-1/ and so on, and `folder`/shards.yaml.

    Each is an ordinary MODEL_DIR of lookups, with some of the tables and all of their features. All get the same version number.
    shards.yaml lists them, for `tpuembed serve --shards`. `folder`/shard-0.config and so on are models.configs for their servers,
    which serve two versions, because a request needs one that is on all shards.

    A later export into the same folder keeps the placement of tables. Another placement needs another folder. An export that was
    interrupted goes on: shards that have the version already are left as they are.

    Args:
        checkpoint: as `export_saved_model` takes it.
        folder: on a disk.
        serving_config: the features, as `export_saved_model` takes them.
        shards: the number of shards. Tables are balanced by bytes and lookups. Give this or `shard_bytes`.
        shard_bytes: the most bytes of tables on a shard. There are as few shards as possible.
        ids_per_list: how many ids a list has on average, by feature. 1 for others: features of sequences count their length.
        on_progress: called with (bytes done, bytes in total) of one shard after the other.
        checkpoint_options: further arguments of `open_checkpoint`.
        options: as `export_saved_model` takes them, without rows, base, max_overlay, delta_to and sign_key. With layout mmap,
            `serving_root` is the folder of all shards as servers see it.

    Raises:
        TpuEmbedError: the export failed. Shards that have the version keep it.
    """
    from tpuembed.export import export_saved_model

    target = Path(folder)
    plan, config, chosen, fingerprint = _planned(
        checkpoint, folder, serving_config, shards, shard_bytes, ids_per_list, checkpoint_options, options
    )
    target.mkdir(parents=True, exist_ok=True)
    version, done = _version(target, plan, chosen.version, fingerprint)
    reports = {}
    for shard in plan.shards:
        if shard.name in done:
            continue
        root = None if chosen.serving_root is None else f"{chosen.serving_root.rstrip('/')}/{shard.name}"
        reports[shard.name] = export_saved_model(
            checkpoint,
            target / shard.name,
            serving_config=config,
            tables=shard.tables,
            on_progress=on_progress,
            checkpoint_options=checkpoint_options,
            **{**options, "version": version, "serving_root": root},
        )
    for shard in plan.shards:
        _write(target / f"{shard.name}.config", _models_config(shard.name, target.absolute() / shard.name))
    if not (target / SHARDS_FILE).exists():
        _write(target / SHARDS_FILE, _NOTE + yaml.safe_dump(_content(target.name, plan), sort_keys=False))
    return ShardingReport(target, version, plan.shards, reports)


def _planned(
    checkpoint: str | Path,
    folder: str | Path,
    serving_config: Any,
    shards: int | None,
    shard_bytes: int | None,
    ids_per_list: Mapping[str, int] | None,
    checkpoint_options: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> tuple[ShardingPlan, ServingConfig, ExportOptions, str]:
    """Return the plan, the features, the options, and the checkpoint's fingerprint."""
    chosen = ExportOptions.of("export_shards", options, without=_WITHOUT)
    path: FilePath = as_path(folder)
    if not isinstance(path, Path):
        raise ConfigError(f"folder {folder}: shards are exported to a disk. Export there, and copy each MODEL_DIR.")
    with open_checkpoint(checkpoint, **(checkpoint_options or {})) as opened:
        config = serving_config_of(opened, serving_config)
        request = LookupRequest(opened, config)
        features, export = request.features, make_plan(opened, request, chosen)
        stored = {place.table: place.rows * stack.row_bytes for stack in export.stacks for place in stack.tables}
        fingerprint = opened.fingerprint()
    lookups = _lookups(features, dict(ids_per_list or {}))
    loads = {name: TableLoad(size, lookups[name]) for name, size in stored.items()}
    before = _placement_in(path)
    if before is None:
        placed = [shard.tables for shard in place(loads, shards=shards, shard_bytes=shard_bytes)]
    else:
        placed = before
        has, needs = {name for tables in placed for name in tables}, set(loads)
        if has != needs or (shards is not None and shards != len(placed)):
            what = f"{len(placed)} shards of the tables {', '.join(sorted(has))}"
            raise ConfigError(
                f"folder {path}: its {SHARDS_FILE} has {what}, and the export has {shards or len(placed)} of "
                f"{', '.join(sorted(needs))}. Export into another folder."
            )
    entries = tuple(
        ShardEntry(
            name=f"shard-{number}",
            tables=tables,
            features=tuple(feature.name for feature in features if feature.table in tables),
            bytes=sum(loads[name].bytes for name in tables),
            lookups=sum(loads[name].lookups for name in tables),
        )
        for number, tables in enumerate(placed)
    )
    return ShardingPlan(entries, _padding(features)), config, chosen, fingerprint


def _lookups(features: tuple[ServedFeature, ...], ids_per_list: dict[str, int]) -> dict[str, int]:
    known = {feature.name for feature in features if feature.spec.input == "ids"}
    for name, count in ids_per_list.items():
        if name not in known:
            raise ConfigError(
                f"ids_per_list: {name!r} is no feature of lists. They are {', '.join(sorted(known)) or 'none'}."
            )
        check_count(f"ids_per_list of {name!r}", count)
    found: dict[str, int] = {}
    for feature in features:
        count = ids_per_list.get(feature.name, feature.spec.max_sequence_length or 1)
        found[feature.table] = found.get(feature.table, 0) + count
    return found


def _padding(features: tuple[ServedFeature, ...]) -> dict[str, int | str]:
    found: dict[str, int | str] = {}
    for feature in features:
        if feature.spec.input == "ids":
            found[feature.name] = "" if feature.names == "string" else -1
        if feature.spec.weighted:
            found[feature.weights_name] = 0
    return found


def _placement_in(folder: Path) -> list[tuple[str, ...]] | None:
    """Return the tables of each shard in the folder's shards.yaml; None if there is none."""
    path = folder / SHARDS_FILE
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return [tuple(shard["tables"]) for shard in content["shards"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"shards {path}: cannot be read: {reason(error)}. Restore it, or export into another folder."
        ) from None


def _version(folder: Path, plan: ShardingPlan, wanted: int | None, fingerprint: str) -> tuple[int, set[str]]:
    """Return the number to write, and the shards that have it already: those of an interrupted run of the same checkpoint."""
    found = {
        shard.name: dict(version_folders(folder / shard.name)) if (folder / shard.name).is_dir() else {}
        for shard in plan.shards
    }
    newest = max((number for numbers in found.values() for number in numbers), default=0)
    number = newest if wanted is None else wanted
    have = {name for name, numbers in found.items() if number in numbers}
    of_this = {name for name in have if _source(found[name][number]) == fingerprint}
    if have and have == of_this and len(have) < len(plan.shards):
        return number, have
    if wanted is not None and have:
        raise ExportError(f"version {wanted}: {', '.join(sorted(have))} of {folder} have it. Give another number.")
    return (newest + 1 if wanted is None else wanted), set()


def _source(version: Path) -> str:
    manifest = Manifest.read(version)
    return "" if manifest is None else manifest.source.get("fingerprint", "")


def _content(model: str, plan: ShardingPlan) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "model": model,
        "shards": [
            {
                "name": shard.name,
                "address": _ADDRESS.format(port=_FIRST_PORT + number),
                "tables": list(shard.tables),
                "features": list(shard.features),
                "bytes": shard.bytes,
                "lookups": shard.lookups,
            }
            for number, shard in enumerate(plan.shards)
        ],
        "padding": dict(plan.padding),
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
