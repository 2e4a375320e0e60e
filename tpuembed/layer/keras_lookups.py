"""Reads the vocabulary of a Keras lookup layer, wherever it is: live, in a `.keras` file, or in a SavedModel.

A SavedModel has the hash table of a layer, and neither the layer's name nor its config.
"""

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tpuembed.checkpoint.keras.vocabularies import CLASSES, of_file, of_layer, of_pairs
from tpuembed.errors import CheckpointCorruptError, CheckpointNotFoundError, ConfigError, reason
from tpuembed.files import FilePath, UrlPath, as_path
from tpuembed.vocabulary import Vocabulary

__all__ = ["read_vocabulary"]


def read_vocabulary(source: Any, layer: str = "", *, oov_buckets: int | None = None) -> Vocabulary:
    """Return the vocabulary of a Keras StringLookup or IntegerLookup, whose rows are the numbers that the layer gives.

    A table that was trained with the layer's numbers keeps its rows.

    Args:
        source: the layer, the path or URL of a `.keras` file, or the path of a SavedModel.
        layer: the name of the layer in the file; in a SavedModel, which has no such names, the place of its hash table, as the
            error lists them. It may be left out if there is one lookup layer.
        oov_buckets: the layer's `num_oov_indices`. A SavedModel needs it, because it does not say. It does not say either whether
            the layer has a `mask_token`, which takes row 0, or a `salt` or another `oov_method`, by which unknown names have other
            rows. If it may have one, pass the layer itself, which is compared.

    Raises:
        ConfigError: the layer gives other numbers than a Vocabulary can, has no vocabulary, or is not there; or a SavedModel's
            oov_buckets is missing or wrong.
        CheckpointNotFoundError: there is no such file.
        CheckpointCorruptError: the file is damaged.
    """
    if isinstance(source, str | Path | UrlPath):
        path = as_path(source)
        if path.suffix != ".keras" and (path / "saved_model.pb").is_file():
            return _of_saved_model(path, layer, oov_buckets)
        if not path.exists():
            raise CheckpointNotFoundError(f"vocabulary: {path} does not exist. Check the path.")
    if oov_buckets is not None:
        raise ConfigError(
            f"vocabulary: oov_buckets={oov_buckets} is for SavedModels, and {source} is none. A layer and a .keras file say it "
            "themselves."
        )
    if isinstance(source, str | Path | UrlPath):
        return of_file(path, layer)
    if type(source).__name__ not in CLASSES and not hasattr(source, "lookup_table"):
        raise ConfigError(
            f"vocabulary: a {type(source).__name__} is no StringLookup or IntegerLookup. Pass one, or the path of a .keras file or "
            "SavedModel."
        )
    return of_layer(source)


def _of_saved_model(path: FilePath, place: str, oov_buckets: int | None) -> Vocabulary:
    tables = _hash_tables(path)
    listed = "; ".join(
        f"{each!r} with {len(names)} names, first {names.item(0)!r}" for each, (names, _) in tables.items()
    )
    if not tables or (place and place not in tables):
        raise ConfigError(
            f"SavedModel {path}: has no hash table{f' at {place!r}' if place else ''} that gives names numbers. It has: "
            f"{listed or 'none'}."
        )
    if not place and len(tables) > 1:
        raise ConfigError(f"SavedModel {path}: has several hash tables: {listed}. Pass the place of one as `layer`.")
    if oov_buckets is None:
        raise ConfigError(
            f"SavedModel {path}: does not say how many rows its lookup has for unknown names. Pass oov_buckets=, the "
            "num_oov_indices of the layer: 1 if it had none."
        )
    names, numbers = tables[place or next(iter(tables))]
    empty = Vocabulary(dtype="string" if names.dtype == object else "int64", oov_buckets=oov_buckets)
    return of_pairs(f"SavedModel {path}: hash table {place or next(iter(tables))!r}", names, numbers, empty)


def _hash_tables(path: FilePath) -> dict[str, tuple[Any, Any]]:
    """Return {place: (names, numbers)} of the hash tables of a SavedModel that have names, in the order of their places."""
    found: dict[str, tuple[Any, Any]] = {}
    seen: set[int] = set()
    try:
        loaded = tf.saved_model.load(str(path))
        view, nodes = tf.train.TrackableView(loaded), [("", loaded)]
        for place, node in nodes:  # grows
            make = getattr(
                node, "_create_resource", None
            )  # a SavedModel's name of the function that makes a hash table
            if make is not None:
                pair = _exported(make.concrete_functions[0].graph, node.resource_handle)
                found.update({} if pair is None else {place: pair})
                continue
            for name, child in view.children(node).items():
                if id(child) not in seen:
                    seen.add(id(child))
                    nodes.append((f"{place}/{name}".lstrip("/"), child))
    except (OSError, ValueError, KeyError, tf.errors.OpError) as error:
        raise CheckpointCorruptError(
            f"SavedModel {path}: cannot be loaded: {reason(error).rstrip('.')}. Restore it from a copy."
        ) from None
    return found


def _exported(graph: tf.Graph, handle: Any) -> tuple[Any, Any] | None:
    """Return (names, numbers) of the hash table that `graph` makes; None if it has others, or none."""
    made = [each for each in graph.get_operations() if each.type == "HashTableV2"]
    types = [(each.get_attr("key_dtype"), each.get_attr("value_dtype")) for each in made]
    if types not in ([(tf.string, tf.int64)], [(tf.int64, tf.int64)], [(tf.int64, tf.string)]):
        return None
    pair = tf.raw_ops.LookupTableExportV2(table_handle=handle, Tkeys=types[0][0], Tvalues=types[0][1])
    keys, values = (each.numpy() for each in pair)
    if not len(keys):
        return None
    names, numbers = (values, keys) if types[0][1] == tf.string else (keys, values)
    order = np.argsort(numbers)
    return names[order], numbers[order]
