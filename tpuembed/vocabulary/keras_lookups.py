"""Reads the names of a Keras StringLookup or IntegerLookup, wherever it is: live, in a `.keras` file, or in a SavedModel.

`model_files` says where a `.keras` file holds them. A SavedModel has the hash table of a layer, and neither the layer's name nor
its config.

Source: keras/src/layers/preprocessing/index_lookup.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from tpuembed.errors import CheckpointCorruptError, CheckpointNotFoundError, ConfigError, MissingExtraError, reason
from tpuembed.files import FilePath, UrlPath, as_path
from tpuembed.vocabulary.model_files import described_objects, read_vocabularies

__all__ = ["Lookup", "read_lookup"]

_CLASSES: Final = ("StringLookup", "IntegerLookup")


class Lookup(NamedTuple):
    """What `Vocabulary` takes: the names in the order of their numbers, their dtype, and how many buckets are before them.

    Attributes:
        where: the place of the layer, for messages.
        names: bytes, str or int.
        dtype: "string" or "int64".
        oov_buckets: number of rows for unknown names.
        is_file: whether a file holds the names, which is then damaged if they are not valid.
    """

    where: str
    names: list[Any]
    dtype: Literal["string", "int64"]
    oov_buckets: int
    is_file: bool = False


def read_lookup(source: Any, layer: str, oov_buckets: int | None) -> Lookup:
    """Return the names of a lookup layer. See `Vocabulary.from_keras`."""
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
        return _of_file(path, layer)
    if type(source).__name__ not in _CLASSES and not hasattr(source, "lookup_table"):
        raise ConfigError(
            f"vocabulary: a {type(source).__name__} is no StringLookup or IntegerLookup. Pass one, or the path of a .keras file or "
            "SavedModel."
        )
    where = f"layer {source.name!r}"
    empty = _without_names(where, vars(source), source.vocabulary_dtype)
    if not int(source.lookup_table.size()):
        raise ConfigError(f"{where}: has no vocabulary. Adapt it, or set its vocabulary, first.")
    keys, values = (tensor.numpy() for tensor in source.lookup_table.export())
    return _with_pairs(empty, *((values, keys) if source.invert else (keys, values)))


def _with_pairs(empty: Lookup, names: Any, numbers: Any) -> Lookup:
    """Return `empty` with the names, which must have the rows after its buckets as their numbers."""
    first, last = empty.oov_buckets, empty.oov_buckets + len(names) - 1
    if not np.array_equal(np.sort(numbers), np.arange(first, last + 1)):
        raise ConfigError(
            f"{empty.where}: its {len(names)} names have numbers from {numbers.min()} to {numbers.max()}, and not each from "
            f"{first} to {last}, as with {first} rows for unknown names. Pass oov_buckets={numbers.min()}, if that is how many it "
            "has. If it has a mask_token, that has row 0, and no number is right: make a Vocabulary of its names."
        )
    return empty._replace(names=names[np.argsort(numbers)].tolist())


def _without_names(where: str, settings: Mapping[str, Any], dtype: str) -> Lookup:
    """Return a Lookup with the buckets of a layer.

    Args:
        where: the layer, for messages.
        settings: what Keras calls the layer's config.
        dtype: of its names.

    Raises:
        ConfigError: the layer gives other numbers than a Vocabulary.
    """
    buckets = settings.get("num_oov_indices", 1)
    method, salt = settings.get("oov_method", "floormod"), settings.get("salt")
    if settings.get("mask_token") is not None:
        raise ConfigError(
            f"{where}: its mask_token {settings['mask_token']!r} has row 0, and a Vocabulary has no such row. Leave row 0 out of "
            f"the table, and pass Vocabulary(layer.get_vocabulary(False), oov_buckets={buckets})."
        )
    if buckets > 1 and (salt is not None or (dtype != "string" and method != "floormod")):
        how = "a salt" if salt is not None else f"oov_method={method!r}"
        raise ConfigError(
            f"{where}: chooses one of {buckets} buckets with {how}. A Vocabulary chooses as Keras does without it. Unknown names "
            "would have other rows. Train with num_oov_indices=1, or without it."
        )
    if settings.get("encoding", "utf-8") not in ("utf-8", None):
        raise ConfigError(f"{where}: has encoding {settings['encoding']!r}. A Vocabulary is UTF-8. Give it bytes.")
    return Lookup(where, [], "string" if dtype == "string" else "int64", buckets)


def _of_file(path: FilePath, layer: str) -> Lookup:
    if path.suffix != ".keras":
        raise ConfigError(f"vocabulary: {path} is no .keras file and no SavedModel. Pass one, or the lookup layer.")
    if not path.is_file():
        raise CheckpointNotFoundError(f"model file {path}: does not exist. Check the path.")
    config, saved = read_vocabularies(path, ())
    lookups = [
        (one["class_name"], fields) for one, fields in described_objects(config) if one["class_name"] in _CLASSES
    ]
    names = sorted({str(settings.get("name")) for _, settings in lookups})
    chosen = [one for one in lookups if layer in ("", str(one[1].get("name")))]
    if not chosen:
        what = f"lookup layer {layer!r}. It has: {', '.join(names)}." if names else "StringLookup or IntegerLookup."
        raise ConfigError(
            f"model file {path}: its config has no {what} A layer that the code of a class makes is not in the config: load the "
            "model, and pass the layer."
        )
    if any(one != chosen[0] for one in chosen):
        raise ConfigError(
            f"model file {path}: has several lookup layers: {', '.join(names)}. Name one, or pass the layer."
        )
    class_name, settings = chosen[0]
    name = str(settings.get("name", ""))
    where = f"model file {path}: layer {name!r}"
    empty = _without_names(
        where, settings, "string" if class_name == "StringLookup" else str(settings.get("vocabulary_dtype") or "int64")
    )
    found = [one for one in saved if one.layer == name]
    if len(found) > 1:
        raise ConfigError(f"{where}: {len(found)} layers have this name. Load the model, and pass the layer.")
    entries = list(found[0].entries()) if found and found[0].entries is not None else []
    special, words = entries[: empty.oov_buckets], entries[empty.oov_buckets :]
    if not words:
        raise ConfigError(
            f"{where}: the file does not have its vocabulary, or has a name with a line end or a NUL at its end. Adapt the layer "
            "before the model is saved, or load the model and pass the layer."
        )
    if special != [str(settings.get("oov_token")).encode()] * empty.oov_buckets:
        raise CheckpointCorruptError(
            f"{where}: its first {empty.oov_buckets} entries are not its oov_token {settings.get('oov_token')!r}. Restore it "
            "from another copy."
        )
    return empty._replace(names=words, is_file=True)


def _of_saved_model(path: FilePath, place: str, oov_buckets: int | None) -> Lookup:
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
    place = place or next(iter(tables))
    names, numbers = tables[place]
    dtype: Literal["string", "int64"] = "string" if names.dtype == object else "int64"
    return _with_pairs(Lookup(f"SavedModel {path}: hash table {place!r}", [], dtype, oov_buckets), names, numbers)


def _hash_tables(path: FilePath) -> dict[str, tuple[Any, Any]]:
    """Return {place: (names, numbers)} of the hash tables of a SavedModel that have names, in the order of their places."""
    try:
        import tensorflow as tf
    except ImportError:
        raise MissingExtraError("Vocabulary.from_keras of a SavedModel", "tensorflow", "tf") from None
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
                made = [
                    each for each in make.concrete_functions[0].graph.get_operations() if each.type == "HashTableV2"
                ]
                types = [(each.get_attr("key_dtype"), each.get_attr("value_dtype")) for each in made]
                if types in ([(tf.string, tf.int64)], [(tf.int64, tf.int64)], [(tf.int64, tf.string)]):
                    ((key, value),) = types
                    pair = tf.raw_ops.LookupTableExportV2(table_handle=node.resource_handle, Tkeys=key, Tvalues=value)
                    keys, values = (each.numpy() for each in pair)
                    names, numbers = (values, keys) if value == tf.string else (keys, values)
                    if len(names):
                        order = np.argsort(numbers)
                        found[place] = names[order], numbers[order]
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
