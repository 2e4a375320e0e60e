"""Exports a checkpoint as several MODEL_DIRs, each with some of the tables, and the file that makes one model of their servers."""

import abc
import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tpuembed.checkpoint import Checkpoint, open_checkpoint
from tpuembed.config import ServingConfig
from tpuembed.config.checks import check_count
from tpuembed.errors import ConfigError, ExportError
from tpuembed.export.graph.roots import naming_roots
from tpuembed.export.graph.signature import ServedFeature, serving_config_of
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan.request import ExportRequest, LookupRequest, ModelRequest, check_lookup_options
from tpuembed.export.report import ExportReport
from tpuembed.export.retention.listing import version_folders
from tpuembed.export.retention.prune import prune_after
from tpuembed.export.run import Progress, make_plan, run_export, source_of
from tpuembed.export.sharding.files import check_same, placed_in, read_shards, write_shards
from tpuembed.export.sharding.placement import PlacedShard, TableLoad, place, weighed
from tpuembed.export.sharding.plan import FRONT, FrontEntry, ShardEntry, ShardingPlan, SplitFeature
from tpuembed.export.stream.shard import Source
from tpuembed.files import FilePath, as_path
from tpuembed.manifest import EXPORT_ID, FeatureEntry, Manifest
from tpuembed.saved_model import SHARDS_FILE

__all__ = ["SHARDS_FILE", "ShardEntry", "ShardingPlan", "ShardingReport", "export_shards", "plan_shards"]

_WITHOUT: Final = ("rows", "base")
"""Options of an export that one of shards does not take."""


@dataclasses.dataclass(frozen=True)
class ShardingReport:
    """The result of `export_shards`.

    Attributes:
        path: the folder of all shards.
        version: the number that each shard's version has.
        shards: what each has.
        reports: of the exports that were made, by shard, and of the front. An interrupted run had made the others.
        front: what the front has; None if lookups were exported.
    """

    path: Path
    version: int
    shards: tuple[ShardEntry, ...]
    reports: Mapping[str, ExportReport]
    front: FrontEntry | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "path": str(self.path),
            "version": self.version,
            "shards": [dataclasses.asdict(shard) for shard in self.shards],
            "front": None if self.front is None else dataclasses.asdict(self.front),
            "reports": {name: report.to_dict() for name, report in self.reports.items()},
        }


def plan_shards(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    serving_config: Any = None,
    model: Any = None,
    allow_unused_weights: bool = False,
    output_names: Mapping[str, str] | None = None,
    shards: int | None = None,
    shard_bytes: int | None = None,
    split: Mapping[str, int] | None = None,
    ids_per_list: Mapping[str, int] | None = None,
    checkpoint_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ShardingPlan:
    """Return which tables `export_shards` would put on which shard. Nothing is written. See `export_shards`."""
    chosen = ExportOptions.of("plan_shards", options, without=_WITHOUT)
    wanted = _Wanted(shards, shard_bytes, split or {}, ids_per_list or {})
    with (
        naming_roots(checkpoint, checkpoint_options, model),
        open_checkpoint(checkpoint, **(checkpoint_options or {})) as opened,
    ):
        exported = _exported(opened, chosen, serving_config, model, output_names, allow_unused_weights)
        return _planned(_disk(folder), exported, wanted)


def export_shards(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    serving_config: Any = None,
    model: Any = None,
    allow_unused_weights: bool = False,
    output_names: Mapping[str, str] | None = None,
    shards: int | None = None,
    shard_bytes: int | None = None,
    split: Mapping[str, int] | None = None,
    ids_per_list: Mapping[str, int] | None = None,
    on_progress: Progress | None = None,
    checkpoint_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ShardingReport:
    """Write a version of each shard into `folder`/shard-0/, `folder`/shard-1/ and so on, and `folder`/shards.yaml.

    Each is an ordinary MODEL_DIR of lookups, with some of the tables and all of their features. All get the same version number.
    shards.yaml lists them, for `tpuembed serve --shards`. `folder`/shard-0.config and so on are models.configs for their servers,
    which serve two versions, because a request needs one that is on all shards.

    With `model`, the shards look up the model's features, and `folder`/front/ is a MODEL_DIR with the rest of the model: its
    signature `from_activations`. It is written last.

    A later export into the same folder keeps the placement of tables. Another placement needs another folder. An export that was
    interrupted goes on: shards that have the version already are left as they are.

    Args:
        checkpoint: as `export_saved_model` takes it.
        folder: on a disk.
        serving_config, model, allow_unused_weights, output_names: as `export_saved_model` takes them.
        shards: the number of shards. Tables are balanced by bytes and lookups. Give this or `shard_bytes`.
        shard_bytes: the most bytes of tables on a shard. There are as few shards as possible. The rows of a larger table are split.
        split: the number of parts, by table, into which rows are split, each on a shard of its own. Their answers add up.
        ids_per_list: how many ids a list has on average, by feature. 1 for others: features of sequences count their length.
        on_progress: called with (bytes done, bytes in total) of one shard after the other.
        checkpoint_options: further arguments of `open_checkpoint`.
        options: as `export_saved_model` takes them, without rows and base. With layout mmap,
            `serving_root` is the folder of all shards as servers see it.

    Raises:
        ExportError: an export of another checkpoint was interrupted. One more version would end the one that is served.
        TpuEmbedError: the export failed. Shards that have the version keep it.
    """
    target, chosen = _disk(folder), ExportOptions.of("export_shards", options, without=_WITHOUT)
    wanted = _Wanted(shards, shard_bytes, split or {}, ids_per_list or {})
    with (
        naming_roots(checkpoint, checkpoint_options, model),
        open_checkpoint(checkpoint, **(checkpoint_options or {})) as opened,
    ):
        source = source_of(opened)  # before anything is read
        exported = _exported(opened, chosen, serving_config, model, output_names, allow_unused_weights)
        plan = _planned(target, exported, wanted)
        target.mkdir(parents=True, exist_ok=True)
        export_id = _export_id(plan, exported, chosen, source)
        version, done = _version(target, plan, chosen.version, export_id)
        reports = {}

        def export(name: str, request: ExportRequest, rows: Mapping[str, tuple[int, int]]) -> None:
            root = None if chosen.serving_root is None else f"{chosen.serving_root.rstrip('/')}/{name}"
            storage = {table: exported.storages[table] for table in request.tables}
            its = dataclasses.replace(chosen, version=version, serving_root=root, rows=rows, storage=storage, keep=None)
            facts = {EXPORT_ID: export_id}
            reports[name] = run_export(
                opened, request, target / name, its, source=source, on_progress=on_progress, facts=facts
            )

        for shard in plan.shards:
            if shard.name not in done:
                export(shard.name, exported.request(shard), shard.rows)
        if plan.front is not None and FRONT not in done:
            export(FRONT, exported.request_of_front(), {})
    write_shards(target, plan)
    if chosen.keep is not None:  # until now, requests needed the version before
        for name, report in reports.items():
            removed = prune_after(target / name, keep=chosen.keep, version=version, in_use={version: "just exported"})
            reports[name] = dataclasses.replace(report, removed=removed)
    return ShardingReport(target, version, plan.shards, reports, plan.front)


def _disk(folder: str | Path) -> Path:
    path: FilePath = as_path(folder)
    if not isinstance(path, Path):
        raise ConfigError(f"folder {folder}: shards are exported to a disk. Export there, and copy each MODEL_DIR.")
    return path


# ---- what is exported


class _Exported(abc.ABC):
    """What is divided among shards.

    Attributes:
        features: the features, as manifests list them.
        padding: as in ShardingPlan.
        is_model: whether the features are those of a model's layers.
        front: of a whole model; None for lookups.
        rows, bytes, storages: of each table.
    """

    is_model: bool
    front: FrontEntry | None = None

    def __init__(
        self,
        opened: Checkpoint,
        options: ExportOptions,
        request: ExportRequest,
        features: Sequence[FeatureEntry],
        padding: Mapping[str, int | str],
    ) -> None:
        """Plan the export of all tables of `request`."""
        self.features, self.padding = features, padding
        stacks = make_plan(opened, request, options).stacks
        self.rows = {place.table: place.rows for stack in stacks for place in stack.tables}
        self.bytes = {place.table: place.rows * stack.row_bytes for stack in stacks for place in stack.tables}
        self.storages = {place.table: stack.storage for stack in stacks for place in stack.tables}

    @abc.abstractmethod
    def request(self, shard: ShardEntry) -> ExportRequest:
        """Return the export of one shard."""

    @abc.abstractmethod
    def names(self) -> dict[str, str]:
        """Return a digest of each vocabulary: a file of names may change between an interrupted export and its end."""

    @abc.abstractmethod
    def request_of_front(self) -> ExportRequest:
        """Return the export of `front`."""


class _Lookups(_Exported):
    """The features of a serving_config."""

    is_model = False

    def __init__(self, opened: Checkpoint, options: ExportOptions, serving_config: Any) -> None:
        self._opened, self._config = opened, serving_config_of(opened, serving_config)
        request = LookupRequest(opened, self._config)
        entries = [feature.entry for feature in request.features]
        super().__init__(opened, options, request, entries, _padding(request.features))
        self._vocabularies = request.vocabularies

    def names(self) -> dict[str, str]:
        """See _Exported."""
        return {table: vocabulary.digest() for table, vocabulary in self._vocabularies.items()}

    def request(self, shard: ShardEntry) -> ExportRequest:
        """See _Exported."""
        features = {
            name: dataclasses.replace(feature, out_of_vocabulary="zeros") if feature.table in shard.rows else feature
            for name, feature in self._config.features.items()
        }
        return LookupRequest(self._opened, ServingConfig(features=features, tables=self._config.tables), shard.tables)

    def request_of_front(self) -> ExportRequest:
        """See _Exported."""
        raise AssertionError("lookups have no front")


class _WholeModel(_Exported):
    """A model, whose layers look up on shards."""

    is_model = True

    def __init__(
        self,
        opened: Checkpoint,
        options: ExportOptions,
        serving_config: Any,
        model: Any,
        output_names: Mapping[str, str] | None,
        allow_unused_weights: bool,
    ) -> None:
        given = opened, serving_config, model, None, output_names, allow_unused_weights
        self._opened, self._whole = opened, ModelRequest(*given)
        self._make_front = functools.partial(ModelRequest, *given, is_front=True)
        from tpuembed.export.graph.from_activations import trace_lookups

        self._lookups = trace_lookups(self._whole.model, self._whole.sources)
        entries = [lookup.entry for lookup in self._lookups]
        super().__init__(opened, options, self._whole, entries, {})
        tables = tuple(self._whole.whole_tables)
        names = tuple(entry.name for entry in entries)
        self.front = FrontEntry(FRONT, names, tables, sum(self.bytes[table] for table in tables))

    def names(self) -> dict[str, str]:
        """See _Exported."""
        of_tables = {table: vocabulary.digest() for table, vocabulary in self._whole.sources.vocabularies.items()}
        return of_tables | {f"layer {one.layer}": one.sha256 for one in self._whole.model.vocabularies()}

    def request(self, shard: ShardEntry) -> ExportRequest:
        """See _Exported."""
        from tpuembed.export.sharding.activations_model import activations_factory

        lookups = [lookup for lookup in self._lookups if lookup.entry.table in shard.tables]
        factory = activations_factory(lookups, self._whole.model.forms, shard.rows)
        request = ModelRequest(self._opened, None, factory)
        request.quantization = self._whole.quantization  # a serving_config may state it
        return request

    def request_of_front(self) -> ExportRequest:
        """See _Exported. The model is built again: functions of its own may keep what the plan's trace had."""
        return self._make_front()


def _exported(
    opened: Checkpoint,
    options: ExportOptions,
    serving_config: Any,
    model: Any,
    output_names: Mapping[str, str] | None,
    allow_unused_weights: bool,
) -> _Exported:
    """Return lookups, or a whole model if `model` is given."""
    if model is not None:
        return _WholeModel(opened, options, serving_config, model, output_names, allow_unused_weights)
    check_lookup_options(output_names, allow_unused_weights)
    return _Lookups(opened, options, serving_config)


def _padding(features: Sequence[ServedFeature]) -> dict[str, int | str]:
    found: dict[str, int | str] = {}
    for feature in features:
        if feature.spec.input == "ids":
            found[feature.name] = "" if feature.names == "string" else -1
        if feature.spec.weighted:
            found[feature.weights_name] = 0
    return found


# ---- where it goes


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """The arguments that decide the placement; see `export_shards`."""

    shards: int | None
    shard_bytes: int | None
    split: Mapping[str, int]
    ids_per_list: Mapping[str, int]

    def __post_init__(self) -> None:
        for name in ("shards", "shard_bytes"):
            if (count := getattr(self, name)) is not None:
                check_count(name, count)


def _planned(folder: Path, exported: _Exported, wanted: _Wanted) -> ShardingPlan:
    """Return the plan: with the placement that `folder` has, or a new one.

    Raises:
        ConfigError: the folder has another one, or is a MODEL_DIR, or an argument is wrong.
    """
    content = read_shards(folder)
    if content is None and folder.is_dir() and (found := version_folders(folder)):
        raise ConfigError(
            f"folder {folder}: is a MODEL_DIR, because it has version {found[-1][0]}. Export the shards into another folder."
        )
    lookups, named = (
        _lookups(exported.features, wanted.ids_per_list),
        {one.table for one in exported.features if one.names},
    )
    loads = {
        name: TableLoad(exported.bytes[name], count, exported.rows[name], name in named)
        for name, count in lookups.items()
    }
    if content is None:
        placed = place(loads, shards=wanted.shards, shard_bytes=wanted.shard_bytes, split=wanted.split)
    else:
        placed = _placed_before(folder, placed_in(content), loads, wanted)
    shards = tuple(
        ShardEntry(
            name=f"shard-{number}",
            tables=shard.tables,
            features=tuple(one.name for one in exported.features if one.table in shard.tables),
            bytes=shard.bytes,
            lookups=shard.lookups,
            rows=shard.rows,
        )
        for number, shard in enumerate(placed)
    )
    split = {
        one.name: SplitFeature(
            table=one.table,
            rows=exported.rows[one.table],
            out_of_vocabulary=one.out_of_vocabulary,
            input=one.input,
            max_sequence_length=one.max_sequence_length,
            drops_negative=exported.is_model and one.input == "ids" and one.out_of_vocabulary == "error",
            weighted=one.weighted,
        )
        for one in exported.features
        if any(one.table in shard.rows for shard in shards)
    }
    plan = ShardingPlan(shards, exported.padding, exported.front, split)
    if content is not None:
        check_same(folder, content, plan)
    return plan


def _placed_before(
    folder: Path,
    shards: Sequence[Mapping[str, tuple[int, int] | None]],
    loads: Mapping[str, TableLoad],
    wanted: _Wanted,
) -> tuple[PlacedShard, ...]:
    """Return the placement `shards` of an export before.

    Raises:
        ConfigError: the arguments name another one.
    """
    parts = Counter(name for shard in shards for name in shard)
    split = {name: count for name, count in parts.items() if any(shard.get(name) for shard in shards)}
    before = f"{len(shards)} shards of {_listed(parts, split)}"
    now = f"{wanted.shards or len(shards)} of {_listed(loads, wanted.split or split)}"
    if parts.keys() != loads.keys() or wanted.shards not in (None, len(shards)) or wanted.split not in ({}, split):
        raise ConfigError(
            f"folder {folder}: its {SHARDS_FILE} has {before}, and the export has {now}. Export into another folder."
        )
    placed = weighed(shards, loads)
    most = max(shard.bytes for shard in placed)
    if wanted.shard_bytes is not None and most > wanted.shard_bytes:
        raise ConfigError(
            f"folder {folder}: a shard of its {SHARDS_FILE} has {most} bytes, which is more than shard_bytes={wanted.shard_bytes}. "
            "Export into another folder."
        )
    return placed


def _listed(tables: Iterable[str], split: Mapping[str, int]) -> str:
    names = [f"{name} in {split[name]} parts" if name in split else name for name in sorted(tables)]
    return f"the tables {', '.join(names)}"


def _lookups(features: Sequence[FeatureEntry], ids_per_list: Mapping[str, int]) -> dict[str, int]:
    """Return the rows that an example looks up in each table."""
    known = {feature.name for feature in features if feature.input == "ids"}
    for name, count in ids_per_list.items():
        if name not in known:
            raise ConfigError(
                f"ids_per_list: {name!r} is no feature of lists. They are {', '.join(sorted(known)) or 'none'}."
            )
        check_count(f"ids_per_list of {name!r}", count)
    found: dict[str, int] = {}
    for feature in features:
        count = ids_per_list.get(feature.name, feature.max_sequence_length or 1)
        found[feature.table] = found.get(feature.table, 0) + count
    return found


def _export_id(plan: ShardingPlan, exported: _Exported, options: ExportOptions, source: Source) -> str:
    """Return what tells this export's shards and front from those of any other: a digest of all that decides their numbers."""
    decided = {
        "checkpoint": [source.fingerprint, source.options],
        "plan": plan.to_dict(),
        "features": [dataclasses.asdict(feature) for feature in exported.features],
        "storage": exported.storages,
        "names": exported.names(),
        "options": [options.layout, options.max_error, options.require_finite],
    }
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]


def _version(folder: Path, plan: ShardingPlan, wanted: int | None, export_id: str) -> tuple[int, set[str]]:
    """Return the number to write, and what has it already: from an interrupted run of the same export."""
    names = [shard.name for shard in plan.shards] + ([] if plan.front is None else [FRONT])
    found = {name: dict(version_folders(folder / name)) if (folder / name).is_dir() else {} for name in names}
    newest = max((number for numbers in found.values() for number in numbers), default=0)
    number = newest if wanted is None else wanted
    have = {name for name, numbers in found.items() if number in numbers}
    of_this = {name for name in have if _export_id_of(found[name][number]) == export_id}
    if have and have == of_this and len(have) < len(names):
        return number, have
    if wanted is not None and have:
        raise ExportError(f"version {wanted}: {', '.join(sorted(have))} of {folder} have it. Give another number.")
    has_newest = sorted(name for name, numbers in found.items() if newest in numbers)
    if len(has_newest) < len(names) and set.intersection(*map(set, found.values())):
        # Servers keep two versions. With one more, those of `has_newest` would not have the one that requests use now.
        raise ExportError(
            f"folder {folder}: version {newest} is on {', '.join(has_newest)} alone, of an export that was interrupted or still "
            f"runs. End it with its own command, or remove {folder / has_newest[0] / str(newest)}"
            f"{' and the others' if len(has_newest) > 1 else ''}."
        )
    return (newest + 1 if wanted is None else wanted), set()


def _export_id_of(version: Path) -> str:
    manifest = Manifest.read(version)
    return "" if manifest is None else manifest.source.get(EXPORT_ID, "")
