"""The keys of a layer's tables in a TensorFlow checkpoint. TensorFlow restores only the keys of the layer's own variables."""

import re
from collections.abc import Iterable, Mapping

import tensorflow as tf

__all__ = ["TABLES_NODE", "children_of", "saved_attributes", "saved_keys", "tables_with_keras_slots"]

TABLES_NODE = "_tpu_embedding"
"""The attribute of a layer that leads to its tables, as TensorFlow Recommenders' layers have it."""

_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_OPTIMIZER_SLOT = "/.OPTIMIZER_SLOT/"


def saved_keys(path: str) -> list[str]:
    """Return the keys of the checkpoint at `path`."""
    return list(tf.train.load_checkpoint(path).get_variable_to_shape_map())


def tables_with_keras_slots(keys: Iterable[str], slots: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the tables of {table: its slots} whose slots the checkpoint has under a Keras 2 optimizer, and not under
    the table.

    TensorFlow Recommenders saves slots that way, unless its optimizer is from `tf.tpu.experimental.embedding`.
    """
    keys = list(keys)
    return [table for table, names in slots.items() if names and _has_keras_slots(keys, table, names)]


def _has_keras_slots(keys: list[str], table: str, slots: Iterable[str]) -> bool:
    own = [f"{TABLES_NODE}/{_escaped(f'{table}/{slot}')}{_VALUE}" for slot in slots]
    of_keras = f"{TABLES_NODE}/{_escaped(table)}{_OPTIMIZER_SLOT}"
    return any(of_keras in key for key in keys) and not any(key.endswith(name) for key in keys for name in own)


def children_of(keys: Iterable[str], path: str) -> set[str]:
    """Return the names of the checkpoint's children of any object whose path ends with `path`."""
    below = re.compile(rf"(?:^|/){re.escape(path)}/([^/]+)/")
    return {_unescaped(match[1]) for key in keys if (match := below.search(key))}


def saved_attributes(keys: Iterable[str], node: str, attribute: str) -> list[str]:
    """Return the keys of `attribute` of the checkpoint's nodes called `node`."""
    end = f"{node}/.ATTRIBUTES/{attribute}"
    return [key for key in keys if key == end or key.endswith(f"/{end}")]


def _escaped(name: str) -> str:
    """Return `name` escaped. Source: escape_local_name in tensorflow/python/trackable/trackable_utils.py."""
    return name.replace(".", "..").replace("/", ".S")


def _unescaped(name: str) -> str:
    return re.sub(r"\.(.)", lambda match: {"S": "/", ".": "."}.get(match[1], match[0]), name)
