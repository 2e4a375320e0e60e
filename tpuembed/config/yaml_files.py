"""Reads YAML. Refuses a key that is given twice."""

from typing import Any

import yaml

__all__ = ["load_unique"]


def load_unique(text: str) -> Any:
    """Return the value of `text`.

    Raises:
        ValueError: it cannot be parsed, or a mapping has a key twice. The second one would silently win.
    """
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """A SafeLoader that refuses a key given twice, because the second one would silently win."""


def _unique_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    given = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # "<<" adds only missing keys
    keys = [loader.construct_object(key, deep=True) for key in given]
    for key in keys:
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
    return yaml.SafeLoader.construct_mapping(loader, node, deep)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)
