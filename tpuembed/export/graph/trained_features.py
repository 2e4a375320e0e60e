"""Compares the features of a factory's model with those of the layers that wrote the checkpoint, which may have been built by other
code: another combiner gives other numbers, and no error."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tpuembed.config import ServingConfig, feature_config_from_dict
from tpuembed.config.structure import flatten
from tpuembed.errors import CheckpointMismatchError, ConfigError

__all__ = ["check_stated", "check_trained", "features_of"]


class Feature(NamedTuple):
    """A feature of a layer: its path in the layer's structure, and what decides the numbers of its activations."""

    path: str
    table: str
    combiner: str
    max_sequence_length: int
    out_of_vocabulary: str | int

    def rules(self) -> dict[str, Any]:
        """Return what a serving_config may state too, by its name there."""
        return {name: getattr(self, name) for name in self._fields[2:]}


def features_of(config: Mapping[str, Any] | None) -> list[Feature]:
    """Return the features of a layer's config, as a checkpoint has it; none of None."""
    if config is None:
        return []
    return [
        Feature(path, one.table.name, one.table.combiner, one.max_sequence_length, one.out_of_vocabulary)
        for path, one in flatten(feature_config_from_dict(config))
    ]


def check_stated(features: Iterable[Feature], config: ServingConfig) -> None:
    """Raise ConfigError where `config` states a rule that no feature of the model has for the table."""
    by_table: dict[str, list[Feature]] = {}
    for feature in features:
        by_table.setdefault(feature.table, []).append(feature)
    stated = [(f"table {name!r}", name, {"combiner": table.combiner}) for name, table in config.tables.items()]
    stated += [(f"feature {name!r}", one.table, _stated(one)) for name, one in config.features.items()]
    for where, table, rules in stated:
        for name, value in rules.items():
            known = {one.rules()[name] for one in by_table.get(table, ())}
            if value is not None and value not in known:
                has = f"has {', '.join(sorted(map(repr, known)))}" if known else "does not look up in its table"
                raise ConfigError(
                    f"serving_config: {where}: {name} is {value!r}, and the model's layer {has}. Remove {name}, or change the "
                    "model."
                )


def check_trained(
    features: Sequence[Feature], trained: Sequence[Feature], source: str, config: ServingConfig | None
) -> None:
    """Raise CheckpointMismatchError where a feature of the model was trained by another rule, which `config` does not state.

    A feature is compared with that of its path, and one of a new path with all of its table.
    """
    paths = {feature.path for feature in features}
    for feature in features:
        asked = {} if config is None else _asked(config, feature, paths)
        same_path = [one for one in trained if one.path == feature.path]
        same_path = same_path or [one for one in trained if one.path.endswith(f"/{feature.path}")]
        others = [one for one in same_path if one.table == feature.table]
        if same_path and not others and not asked:
            raise CheckpointMismatchError(
                f"model: feature {feature.path!r} looks up in table {feature.table!r}, and in {source} in table "
                f"{same_path[0].table!r}. Build the features in the order, and by the names, of the training, or name the table of "
                "each input in a serving_config."
            )
        others = others or [one for one in trained if one.table == feature.table]
        differences = [_differences(feature, one) for one in others]
        if not differences or not min(differences, key=len):
            continue
        for name, (here, there) in differences[0].items():
            if asked.get(name) != here:
                raise CheckpointMismatchError(
                    f"model: feature {feature.path!r} of table {feature.table!r} has {name} {here!r}, and was trained in {source} "
                    f"with {there!r}. Build the model as in training, or state the new rule in a serving_config."
                )


def _differences(one: Feature, other: Feature) -> dict[str, tuple[Any, Any]]:
    """Return (value of the one, value of the other) by name of a rule."""
    found = {name: (value, other.rules()[name]) for name, value in one.rules().items() if value != other.rules()[name]}
    if one.max_sequence_length and other.max_sequence_length:
        found.pop("combiner", None)  # a sequence is not combined
    return found


def _asked(config: ServingConfig, feature: Feature, paths: Collection[str]) -> dict[str, Any]:
    """Return the rules that `config` states for a feature: those of its path, of its table, and of inputs that are no path."""
    rules: dict[str, Any] = {}
    for name, one in config.features.items():
        if one.table == feature.table and (name == feature.path or name not in paths):
            rules |= {key: value for key, value in _stated(one).items() if value is not None}
            rules.setdefault("max_sequence_length", 0)
    stated = config.tables.get(feature.table)
    return rules | ({"combiner": stated.combiner} if stated is not None and stated.combiner else {})


def _stated(feature: Any) -> dict[str, Any]:
    length = feature.max_sequence_length or None
    return {
        "combiner": feature.combiner,
        "max_sequence_length": length,
        "out_of_vocabulary": feature.out_of_vocabulary,
    }
