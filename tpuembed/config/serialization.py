"""Conversion of configs to and from dicts, and from JSON and YAML."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuembed.config.checks import check_keys, did_you_mean, from_mapping
from tpuembed.config.structure import flatten, map_leaves
from tpuembed.config.tables import FeatureConfig, TableConfig, checked_vocabulary
from tpuembed.errors import ConfigError, reason
from tpuembed.vocabulary import Vocabulary

__all__ = ["feature_config_from_dict", "feature_config_to_dict", "load_mapping"]

_FEATURE_KEYS = tuple(field.name for field in dataclasses.fields(FeatureConfig))


def load_mapping(source: str | Path | Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """Return `source` if it is a mapping, else the content of the .yaml, .yml or .json file.

    Raises:
        ConfigError: the file is missing, cannot be parsed, or holds no mapping. The message calls it `what`.
    """
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path}: cannot be read: {reason(error)}") from None
    try:
        parsed = json.loads(text, object_pairs_hook=_unique_pairs) if path.suffix == ".json" else _of_yaml(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} {path}: cannot be parsed: {' '.join(reason(error).split())}") from None
    if not isinstance(parsed, Mapping):
        raise ConfigError(f"{what} {path}: expected a mapping at the top, got {type(parsed).__name__}")
    return parsed


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises ValueError if a key is given twice."""
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key!r} is given twice")
    return dict(pairs)


def _of_yaml(text: str) -> Any:
    """Return the value of `text`. Raises ValueError if it cannot be parsed, or a mapping has a key twice."""
    import yaml  # here, because it costs as much as the config modules, and most programs write configs in Python

    class UniqueKeyLoader(yaml.SafeLoader):
        """Refuses a key given twice, because the second one would silently win."""

    def unique_mapping(loader: UniqueKeyLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        given = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # "<<" adds only missing keys
        keys = [loader.construct_object(key, deep=True) for key in given]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
        return yaml.SafeLoader.construct_mapping(loader, node, deep)

    UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, unique_mapping)
    try:
        return yaml.load(text, UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def feature_config_to_dict(features: Any) -> dict[str, Any]:
    """Return `{"tables": {name: ...}, "features": <same nesting, tables by name>}`, as JSON values."""
    tables: dict[str, TableConfig] = {}
    for path, feature in flatten(features):
        if not isinstance(feature, FeatureConfig):
            raise ConfigError(f"feature {path!r}: expected a tpuembed.FeatureConfig, got {feature!r}")
        tables[feature.table.name] = feature.table
    as_dicts = map_leaves(lambda feature: feature.to_dict(), features)
    return {"tables": {name: table.to_dict() for name, table in tables.items()}, "features": as_dicts}


def feature_config_from_dict(value: str | Path | Mapping[str, Any]) -> Any:
    """Return the nested structure of FeatureConfig that `feature_config_to_dict` wrote, from a dict or a YAML/JSON
    file.

    Raises:
        ConfigError: a key is unknown, a feature has an unknown table, or a field is out of range.
    """
    mapping = load_mapping(value, "feature config")
    check_keys("feature config", mapping, ("tables", "features"))
    if not isinstance(mapping.get("tables"), Mapping) or "features" not in mapping:
        raise ConfigError("feature config: needs a mapping `tables` and a structure `features`")
    tables = dict[str, TableConfig]()
    for name, fields in mapping["tables"].items():
        if isinstance(fields, Mapping) and fields.get("name", name) != name:
            raise ConfigError(f"table {name!r}: its field name is {fields['name']!r}. Make them equal.")
        given = {"name": name, **fields} if isinstance(fields, Mapping) else fields
        tables[name] = from_mapping(TableConfig, f"table {name!r}", given)
    return _features_from(mapping["features"], tables, "features", {})


def _features_from(
    node: Any, tables: Mapping[str, TableConfig], path: str, vocabularies: dict[str, Vocabulary | None]
) -> Any:
    """Return the features of `node`. Those of one table share the vocabulary in `vocabularies`, which is filled here."""
    if isinstance(node, Mapping) and not isinstance(node.get("table"), str):
        return {key: _features_from(child, tables, f"{path}/{key}", vocabularies) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return [_features_from(child, tables, f"{path}/{i}", vocabularies) for i, child in enumerate(node)]
    if not isinstance(node, Mapping):
        raise ConfigError(f"{path}: expected a mapping with a key `table`, got {node!r}")
    check_keys(path, node, _FEATURE_KEYS)
    if node["table"] not in tables:
        raise ConfigError(f"{path}: unknown table {node['table']!r}; {did_you_mean(node['table'], tables)}")
    fields = {**node, "table": tables[node["table"]]}
    if node.get("vocabulary") is not None:
        given = checked_vocabulary(path, node["vocabulary"])
        shared = vocabularies.setdefault(node["table"], given)
        if given is not None and shared is not None and (unlike := given.unlike(shared)):
            option, own, its = unlike
            raise ConfigError(
                f"{path}: the {option} of its vocabulary is {own}, and that of another feature of table {node['table']!r} is "
                f"{its}. Make them equal."
            )
        fields["vocabulary"] = shared
    return FeatureConfig(**fields)
