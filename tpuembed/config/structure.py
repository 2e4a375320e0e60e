"""Nested structures of features: dicts, lists, tuples and named tuples, walked in one order with a path per leaf.

Dict keys are walked sorted, as `tf.nest` does. So table numbers and checkpoints do not depend on insertion order.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from tpuembed.errors import ConfigError

__all__ = ["check_plain", "flatten", "flatten_up_to", "map_leaves", "pack_like"]

T = TypeVar("T")


def _children(node: Any) -> list[tuple[str, Any]] | None:
    """Return (key, child) pairs of a container in walking order. Returns None for a leaf."""
    if isinstance(node, Mapping):
        return [(str(key), node[key]) for key in sorted(node, key=str)]
    if isinstance(node, list | tuple):
        return [(str(index), child) for index, child in enumerate(node)]
    return None


def flatten(structure: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) pairs. The keys of a path are joined with "/"."""
    children = _children(structure)
    if children is None:
        yield path, structure
        return
    for key, child in children:
        yield from flatten(child, f"{path}/{key}" if path else key)


def flatten_up_to(
    shallow: Any, deep: Any, what: str, remedy: str = "", path: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, leaf of `shallow`, the subtree of `deep` at that path).

    Raises:
        ConfigError: `deep` lacks or adds an entry. The message calls it `what`, gives both sides, and ends with `remedy`.
    """
    children = _children(shallow)
    if children is None:
        yield path, shallow, deep
        return
    found, end = _children(deep), f". {remedy}." if remedy else ""
    where, wanted = f"{what} at {path!r}" if path else what, ", ".join(key for key, _ in children)
    if found is None:
        raise ConfigError(f"{where} must be a structure with the keys [{wanted}], got {type(deep).__name__}{end}")
    given = ", ".join(key for key, _ in found)
    if [key for key, _ in children] != [key for key, _ in found]:
        raise ConfigError(f"{where} must have the keys of the layer's config, [{wanted}], got [{given}]{end}")
    for (key, child), (_, other) in zip(children, found, strict=True):
        yield from flatten_up_to(child, other, what, remedy, f"{path}/{key}" if path else key)


def check_plain(structure: Any) -> None:
    """Raise ConfigError for a structure that JSON would change: keys that are not strings, named tuples."""
    if hasattr(structure, "_fields"):
        raise ConfigError(
            f"features: a named tuple ({type(structure).__name__}) cannot be saved in a config. Use a dict."
        )
    if isinstance(structure, Mapping):
        for key in structure:
            if not isinstance(key, str):
                raise ConfigError(f"features: the key {key!r} cannot be saved in a config. Use strings as keys.")
    for _, child in _children(structure) or ():
        check_plain(child)


def pack_like(structure: Any, leaves: list[T]) -> Any:
    """Return `structure` with its leaves replaced, in walking order."""
    remaining = iter(leaves)
    return map_leaves(lambda _: next(remaining), structure)


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """Return `structure` with `function` applied to every leaf, in walking order. Dicts keep their own key order."""
    children = _children(structure)
    if children is None:
        return function(structure)
    values = [map_leaves(function, child) for _, child in children]
    if isinstance(structure, Mapping):
        by_key = dict(zip(sorted(structure, key=str), values, strict=True))
        return {key: by_key[key] for key in structure}
    if hasattr(structure, "_fields"):
        return type(structure)(*values)
    return type(structure)(values)
