"""Vocabularies of Keras' StringLookup and IntegerLookup layers, live or in `.keras` files, with the rows that they have there.

A `.keras` file holds the vocabulary of a layer that was adapted in `vocabulary.txt` among its assets, with the entries of
buckets before the names, and that of a layer that was given one in the config of the layer.

Source: keras/src/layers/preprocessing/index_lookup.py.
"""

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np

from tpuembed.checkpoint.keras.archive import member_sizes, opened_member
from tpuembed.checkpoint.keras.weights import Weights, open_window
from tpuembed.config.checks import did_you_mean
from tpuembed.errors import CheckpointCorruptError, CheckpointNotFoundError, ConfigError, reason
from tpuembed.files import FilePath
from tpuembed.vocabulary import Vocabulary

__all__ = ["CLASSES", "of_file", "of_layer", "of_pairs", "words_of"]

CLASSES: Final = ("StringLookup", "IntegerLookup")
"""The lookup layers that can be read."""
_VOCABULARY: Final = "vocabulary.txt"
_LONGEST_TOKEN: Final = 1 << 16


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
    weights = Weights.open(path)
    with contextlib.closing(weights):
        class_name, settings = _settings(path, layer, list(_lookups(weights.config)))
        name = str(settings.get("name", ""))
        where = f"model file {path}: layer {name!r}"
        dtype = "string" if class_name == "StringLookup" else str(settings.get("vocabulary_dtype") or "int64")
        empty = _without_names(where, settings, dtype)
        words, size = words_of(settings), settings.get("vocabulary_size")
        if words is not None:
            special = words[: empty.oov_buckets]
            has_special = special == [settings.get("oov_token")] * len(special) and len(special) == empty.oov_buckets
            if size == empty.oov_buckets + len(words):  # Keras does not take bytes for its token
                has_special = False
            given = words[len(special) :] if has_special else words
            if wrong := [word for word in given if isinstance(word, str) and word.endswith("\0")]:
                raise ConfigError(
                    f"{where}: its name {wrong[0]!r} ends with NUL, and Keras looks it up without. Pass the layer."
                )
            try:
                found = Vocabulary(given, **empty.options())
            except ConfigError as error:
                raise CheckpointCorruptError(
                    f"{where}: its vocabulary cannot be read: {reason(error)} Save it again."
                ) from None
        else:
            found = _of_asset(where, path, _asset(where, name, path, weights), settings, empty)
    has = found.rows
    if size is not None and size != has:
        raise ConfigError(
            f"{where}: has {size} rows, and {has} in the file's vocabulary. A name with a line end makes several. Pass the layer."
        )
    return found


def words_of(settings: Mapping[str, Any]) -> list[Any] | None:
    """Return the list in the config of a lookup layer, or None. Keras describes bytes in it as objects."""
    words = settings.get("vocabulary")
    if not isinstance(words, list):
        return None
    return [
        word["config"].get("value")
        if isinstance(word, dict) and word.get("class_name") == "__bytes__" and isinstance(word.get("config"), dict)
        else word
        for word in words
    ]


def _lookups(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the class and the config of each lookup layer that `config` describes, at any depth."""
    pending = [config]
    while pending:
        node = pending.pop()
        if isinstance(node, Mapping):
            if node.get("class_name") in CLASSES and isinstance(node.get("config"), Mapping):
                yield node["class_name"], node["config"]
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)


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


def _asset(where: str, name: str, path: FilePath, weights: Weights) -> str:
    """Return the name of the file in the archive that has the vocabulary of layer `name`."""
    window = open_window(path)
    with contextlib.closing(window.file):
        members = member_sizes(window)
    found = []
    for member in members:
        place = PurePosixPath(member)
        group = weights.groups.get("/".join(place.parts[1:-1]))
        if place.parts[0] == "assets" and place.name == _VOCABULARY and group is not None and group.name == name:
            found.append(member)
    if len(found) > 1:
        raise ConfigError(f"{where}: {len(found)} layers have this name. Load the model, and pass the layer.")
    if not found:
        raise _no_vocabulary(where)
    return found[0]


def _no_vocabulary(where: str) -> ConfigError:
    return ConfigError(f"{where}: has no vocabulary in the file. Adapt the layer before the model is saved.")


def _of_asset(where: str, path: FilePath, member: str, settings: Mapping[str, Any], empty: Vocabulary) -> Vocabulary:
    """Return `empty` with the names in a file of the archive, one a line. The first lines are those of its buckets."""
    window = open_window(path)
    with contextlib.closing(window.file), tempfile.NamedTemporaryFile() as lines:
        with opened_member(window, member) as file:
            read = iter(lambda: file.readline(_LONGEST_TOKEN), b"")
            special = list(itertools.islice(read, empty.oov_buckets))
            shutil.copyfileobj(file, lines)
            lines.write(b"\n")  # the file ends without one
        lines.flush()
        token = str(settings.get("oov_token"))
        others = {line.removesuffix(b"\n") for line in special} - {token.encode()}
        if others or len(special) < empty.oov_buckets:
            raise CheckpointCorruptError(
                f"{where}: the first {empty.oov_buckets} lines of {member} are not its oov_token {token!r}. Restore it from "
                "another copy."
            )
        if special and not special[-1].endswith(b"\n"):
            raise _no_vocabulary(where)
        try:
            return Vocabulary.from_file(lines.name, **empty.options())
        except ConfigError as error:
            why = str(error).replace(f"vocabulary {lines.name}: cannot be read: ", "")
            why = why.removeprefix("vocabulary: ").partition(". ")[0]
            raise CheckpointCorruptError(f"{where}: {member}: {why}. Restore it from another copy.") from None
