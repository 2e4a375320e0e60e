"""Where a checkpoint has a layer's tables, by its keys: TensorFlow restores only what it finds at the places of the layer's own."""

import re
from collections.abc import Iterable, Mapping

import tensorflow as tf

__all__ = ["children_of", "kept_by_keras", "saved_keys"]

_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_OPTIMIZER_SLOT = "/.OPTIMIZER_SLOT/"


def saved_keys(path: str) -> list[str]:
    """The keys of the checkpoint at `path`."""
    return list(tf.train.load_checkpoint(path).get_variable_to_shape_map())


def kept_by_keras(keys: Iterable[str], slots: Mapping[str, Iterable[str]]) -> list[str]:
    """Those of the tables in {table: its slots} whose slots an optimizer of Keras 2 keeps in the checkpoint, and no table.

    That is how TensorFlow Recommenders saves slots unless its optimizer is of `tf.tpu.experimental.embedding`.
    """
    keys = list(keys)
    return [table for table, names in slots.items() if names and _is_kept_by_keras(keys, table, names)]


def _is_kept_by_keras(keys: list[str], table: str, slots: Iterable[str]) -> bool:
    own = [f"_tpu_embedding/{_escaped(f'{table}/{slot}')}{_VALUE}" for slot in slots]
    theirs = f"_tpu_embedding/{_escaped(table)}{_OPTIMIZER_SLOT}"
    return any(theirs in key for key in keys) and not any(key.endswith(name) for key in keys for name in own)


def children_of(keys: Iterable[str], path: str) -> set[str]:
    """The names of what the checkpoint has below the object at the end of `path`, wherever that stands."""
    below = re.compile(rf"(?:^|/){re.escape(path)}/([^/]+)/")
    return {_unescaped(match[1]) for key in keys if (match := below.search(key))}


def _escaped(name: str) -> str:
    """Source: escape_local_name in tensorflow/python/trackable/trackable_utils.py."""
    return name.replace(".", "..").replace("/", ".S")


def _unescaped(name: str) -> str:
    return re.sub(r"\.(.)", lambda match: {"S": "/", ".": "."}.get(match[1], match[0]), name)
