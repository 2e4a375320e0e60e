"""YAML in which no key is given twice."""

from collections.abc import Mapping
from typing import Any

import yaml

__all__ = ["dump", "load_unique"]


def load_unique(text: str) -> Any:
    """What `text` holds.

    Raises:
        ValueError: it does not parse, or a mapping has a key twice, of which the second would silently win.
    """
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def dump(config: Mapping[str, Any]) -> str:
    """`config` as YAML, its keys in their order."""
    return yaml.safe_dump(dict(config), sort_keys=False)


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice: the second would silently win."""


def _unique_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    given = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # "<<" gives only what is missing
    keys = [loader.construct_object(key, deep=True) for key in given]
    for key in keys:
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
    return yaml.SafeLoader.construct_mapping(loader, node, deep)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)
