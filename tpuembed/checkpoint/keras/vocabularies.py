"""Vocabularies of Keras' StringLookup and IntegerLookup layers, live or in `.keras` files, with the rows that they have there.

`trained_vocabularies` says where a `.keras` file holds them.

Source: keras/src/layers/preprocessing/index_lookup.py.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tpuembed.checkpoint.keras.trained_vocabularies import described_objects, read_vocabularies
from tpuembed.config.checks import did_you_mean
from tpuembed.errors import CheckpointCorruptError, CheckpointNotFoundError, ConfigError, reason
from tpuembed.files import FilePath
from tpuembed.vocabulary import Vocabulary

__all__ = ["CLASSES", "of_file", "of_layer", "of_pairs"]

CLASSES: Final = ("StringLookup", "IntegerLookup")
"""The lookup layers that can be read."""


def of_layer(layer: Any) -> Vocabulary:
    """Return the vocabulary of a live layer. Raises ConfigError as `read_vocabulary` does."""
    where = f"layer {layer.name!r}"
    empty = _without_names(where, vars(layer), layer.vocabulary_dtype)
    if not int(layer.lookup_table.size()):
        raise ConfigError(f"{where}: has no vocabulary. Adapt it, or set its vocabulary, first.")
    keys, values = (tensor.numpy() for tensor in layer.lookup_table.export())
    return of_pairs(where, *((values, keys) if layer.invert else (keys, values)), empty)


def of_pairs(where: str, names: Any, numbers: Any, empty: Vocabulary) -> Vocabulary:
    """Return `empty` with the names, which must have the rows after its buckets as their numbers."""
    first, last = empty.oov_buckets, empty.oov_buckets + len(names) - 1
    if not np.array_equal(np.sort(numbers), np.arange(first, last + 1)):
        raise ConfigError(
            f"{where}: its {len(names)} names have numbers from {numbers.min()} to {numbers.max()}, and not each from {first} to "
            f"{last}, as with {first} rows for unknown names. Pass oov_buckets={numbers.min()}, if that is how many it has. If it "
            "has a mask_token, that has row 0, and no number is right: make a Vocabulary of its names."
        )
    return Vocabulary(names[np.argsort(numbers)].tolist(), **empty.options())


def _without_names(where: str, settings: Mapping[str, Any], dtype: str) -> Vocabulary:
    """Return a Vocabulary with the buckets of a layer.

    Args:
        where: the layer, for messages.
        settings: what Keras calls the layer's config.
        dtype: of its names.

    Raises:
        ConfigError: the layer gives other numbers than a Vocabulary.
    """
    buckets = settings.get("num_oov_indices", 1)
    method, salt = settings.get("oov_method", "floormod"), settings.get("salt")
    found = Vocabulary(dtype="string" if dtype == "string" else "int64", oov_buckets=buckets)
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
    return found


def of_file(path: FilePath, layer: str) -> Vocabulary:
    """Return the vocabulary of a layer in a `.keras` file. Raises the errors of `read_vocabulary`."""
    if path.suffix != ".keras":
        raise ConfigError(f"vocabulary: {path} is no .keras file and no SavedModel. Pass one, or the lookup layer.")
    if not path.is_file():
        raise CheckpointNotFoundError(f"model file {path}: does not exist. Check the path.")
    config, saved = read_vocabularies(path, ())
    lookups = [(one["class_name"], fields) for one, fields in described_objects(config) if one["class_name"] in CLASSES]
    class_name, settings = _settings(path, layer, lookups)
    name = str(settings.get("name", ""))
    where = f"model file {path}: layer {name!r}"
    empty = _without_names(
        where, settings, "string" if class_name == "StringLookup" else str(settings.get("vocabulary_dtype") or "int64")
    )
    found = [one for one in saved if one.layer == name]
    if len(found) > 1:
        raise ConfigError(f"{where}: {len(found)} layers have this name. Load the model, and pass the layer.")
    entries = list(found[0].entries()) if found and found[0].entries is not None else []
    special, names = entries[: empty.oov_buckets], entries[empty.oov_buckets :]
    if not names:
        raise ConfigError(
            f"{where}: the file does not have its vocabulary, or has a name with a line end or a NUL at its end. Adapt the layer "
            "before the model is saved, or load the model and pass the layer."
        )
    if special != [str(settings.get("oov_token")).encode()] * empty.oov_buckets:
        raise CheckpointCorruptError(
            f"{where}: its first {empty.oov_buckets} entries are not its oov_token {settings.get('oov_token')!r}. Restore it "
            "from another copy."
        )
    try:
        return Vocabulary(names if empty.dtype == "string" else list(map(int, names)), **empty.options())
    except (ConfigError, ValueError) as error:
        raise CheckpointCorruptError(
            f"{where}: its vocabulary cannot be read: {reason(error)} Restore it from another copy."
        ) from None


def _settings(
    path: FilePath, layer: str, lookups: list[tuple[str, Mapping[str, Any]]]
) -> tuple[str, Mapping[str, Any]]:
    """Return the class and the config of the layer of that name."""
    names = sorted({str(settings.get("name")) for _, settings in lookups})
    found = [one for one in lookups if layer in ("", str(one[1].get("name")))]
    if not found:
        what = f"lookup layer {layer!r}; {did_you_mean(layer, names)}" if names else "StringLookup or IntegerLookup."
        raise ConfigError(
            f"model file {path}: its config has no {what} A layer that the code of a class makes is not in the config: load the "
            "model, and pass the layer."
        )
    if any(one != found[0] for one in found):
        raise ConfigError(
            f"model file {path}: has several lookup layers: {', '.join(names)}. Name one, or pass the layer."
        )
    return found[0]
