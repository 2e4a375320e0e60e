"""The vocabularies of a model's preprocessing layers: recorded in an export, and compared with those of the training.

They are not weights, so the factory has to provide them. Entry k is the one that the layer maps to k, masks and out of
vocabulary entries included, as `get_vocabulary()` lists them. Another order returns the rows of other words, without
any error.
"""

import dataclasses
import functools
import hashlib
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Any, Final

import keras
import numpy as np
import tensorflow as tf

from tpuembed.errors import CheckpointMismatchError, ConfigError
from tpuembed.files import FilePath, as_path, open_stream
from tpuembed.manifest import VocabularyEntry

__all__ = ["check_vocabularies", "vocabularies_of"]

_LOOKUPS: Final = (keras.layers.StringLookup, keras.layers.IntegerLookup)
_CHUNK: Final = 1 << 16
_CONFIG, _WEIGHTS, _VOCABULARY = "config.json", "model.weights.h5", "vocabulary.txt"
_KINDS: Final = ("string_lookup", "integer_lookup", "text_vectorization")


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
    """One vocabulary.

    Attributes:
        layer: the layer's name; "" if it is not known.
        kind: its class, in snake case.
        entries: returns them as UTF-8, in the order of their numbers; None if they are not known.
    """

    layer: str
    kind: str
    entries: Callable[[], Iterable[bytes]] | None

    @functools.cached_property
    def described(self) -> VocabularyEntry:
        """Return its size and its digest. This reads all of it."""
        digest, size = hashlib.sha256(), 0
        for entry in self.entries() if self.entries else ():
            digest.update(b"%d:%s," % (len(entry), entry))
            size += 1
        return VocabularyEntry(layer=self.layer, size=size, sha256=digest.hexdigest())

    @property
    def number(self) -> int | None:
        """Return the number in a generated Keras name: 0 for string_lookup, 3 for string_lookup_3; None for a user's
        name.
        """
        match = re.fullmatch(rf"{re.escape(self.kind)}(?:_(\d+))?", self.layer) if self.kind else None
        return int(match[1] or 0) if match else None


def vocabularies_of(model: Any) -> tuple[VocabularyEntry, ...]:
    """Return size and digest of each vocabulary of `model`, by the names of its layers.

    Raises:
        ConfigError: a layer has no vocabulary, so every value would be out of vocabulary.
    """
    return tuple(vocabulary.described for vocabulary in _of_model(model))


def _of_model(model: Any) -> list[_Vocabulary]:
    nodes = tf.train.TrackableView(model).descendants()
    vectorizers = [node for node in nodes if isinstance(node, keras.layers.TextVectorization)]
    owners = {id(owner._lookup_layer): owner for owner in vectorizers}
    found = []
    for node in nodes:
        owner = owners.get(id(node), node)
        if isinstance(node, _LOOKUPS):
            _check_is_there(node, owner)
            found.append(_Vocabulary(owner.name, _snake(type(owner).__name__), functools.partial(_entries, node)))
        elif isinstance(node, keras.layers.Discretization) and node.bin_boundaries is not None:
            bounds = functools.partial(map, _boundary, list(node.bin_boundaries))
            found.append(_Vocabulary(node.name, _snake(type(node).__name__), bounds))
    return sorted(found, key=lambda vocabulary: (vocabulary.layer, vocabulary.kind))


def _check_is_there(layer: Any, owner: Any) -> None:
    if layer.vocabulary_size() <= layer.num_oov_indices + 1 and not layer.get_vocabulary(include_special_tokens=False):
        raise ConfigError(
            f"model: layer {owner.name!r} has no vocabulary. A vocabulary is not a weight, so it is not restored. "
            "Set it in the factory."
        )


def _snake(class_name: str) -> str:
    """Return the snake case of a class name, as Keras starts generated names."""
    parted = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", class_name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", parted).lower()


def _boundary(bound: Any) -> bytes:
    return repr(float(np.float32(bound))).encode()


def _entries(layer: Any) -> Iterator[bytes]:
    """Yield the entries as `get_vocabulary` lists them. A list of millions of texts would take gigabytes."""
    keys, values = layer.lookup_table.export()
    words, numbers = (values, keys) if layer.invert else (keys, values)
    first = layer.vocabulary_size() - int(words.shape[0])
    special = _special(layer.mask_token, layer.oov_token, layer.num_oov_indices, layer.output_mode)
    yield from (special + [str(layer.oov_token).encode()] * first)[:first]
    words = tf.gather(words, tf.argsort(numbers))
    for start in range(0, int(words.shape[0]), _CHUNK):
        for word in words[start : start + _CHUNK].numpy().tolist():
            yield word if isinstance(word, bytes) else str(word).encode()


def _special(mask: Any, oov: Any, count: int, mode: str) -> list[bytes]:
    """Return the entries before the first word."""
    masks = [str(mask).encode()] if mask is not None and mode == "int" else []
    return masks + [str(oov).encode()] * count


# ---- of a `.keras` file


def check_vocabularies(model: Any, source: str | FilePath) -> None:
    """Compare the vocabularies of `model` with those in the `.keras` file that it was saved in. Do nothing for other
    sources.

    A layer with a user's name is compared with the layer of that name. Layers with generated names must have the file's
    vocabularies in the order in which the layers were made: all of them, or some if the factory makes fewer. When the
    file has none left, a further layer counts as added by the factory.

    Raises:
        CheckpointMismatchError: a vocabulary differs; the message names the first difference.
    """
    path = as_path(source)
    mine = _of_model(model) if path.suffix == ".keras" and path.is_file() else []
    if not mine:
        return
    saved = _of_archive(path)
    by_name: dict[str, list[_Vocabulary]] = {}
    for vocabulary in saved:
        if vocabulary.number is None and vocabulary.layer:
            by_name.setdefault(vocabulary.layer, []).append(vocabulary)
    rest = []
    for vocabulary in mine:
        if vocabulary.number is not None or vocabulary.layer not in by_name:
            rest.append(vocabulary)
        elif not any(_is_same(vocabulary, one) for one in by_name[vocabulary.layer]):
            raise _differs(vocabulary, by_name[vocabulary.layer][0], source)
    left = [one for one in saved if one.layer not in by_name]
    if any(vocabulary.number is not None for vocabulary in rest):
        names = {vocabulary.layer for vocabulary in mine}
        left += [one for name, named in by_name.items() if name not in names for one in named]
    _check_in_order(rest, left, source)


def _is_same(mine: _Vocabulary, saved: _Vocabulary) -> bool:
    """Returns True if they are equal, as far as the file has the entries."""
    return saved.entries is None or mine.described.sha256 == saved.described.sha256


def _check_in_order(mine: Sequence[_Vocabulary], saved: Sequence[_Vocabulary], source: str | FilePath) -> None:
    """Compare layers without a counterpart of their name with `saved`, the rest of the file's vocabularies.

    Layers with generated names are compared first, in order. A layer with a user's name must then equal one of the
    rest, or be new.
    """
    numbered, left = sorted((one for one in mine if one.number is not None), key=_made_as), sorted(saved, key=_made_as)
    if len(numbered) == len(left):
        for one, other in zip(numbered, left, strict=True):
            if not _is_same(one, other):
                raise _differs(one, other, source)
        return
    begin = 0
    for one in numbered if left else ():
        found = next((place for place in range(begin, len(left)) if _is_same(one, left[place])), None)
        if found is None:
            raise _differs(one, _nearest(one, left), source)
        begin = found
        del left[found]
    for one in mine:
        if one.number is None and left:
            found = next((place for place, other in enumerate(left) if _is_same(one, other)), None)
            if found is None:
                raise _differs(one, _nearest(one, left), source)
            del left[found]


def _nearest(mine: _Vocabulary, saved: Sequence[_Vocabulary]) -> _Vocabulary:
    """Return the vocabulary of `saved` to compare `mine` with in a message: one of its class, if there is one."""
    known = [one for one in saved if one.entries is not None]
    return next((one for one in known if one.kind == mine.kind), known[0])


def _made_as(vocabulary: _Vocabulary) -> tuple[str, int, str]:
    """Return a sort key that orders layers of one class by their generated numbers, and so by creation."""
    number = vocabulary.number
    return vocabulary.kind, -1 if number is None else number, vocabulary.layer


def _differs(mine: _Vocabulary, saved: _Vocabulary, source: str | FilePath) -> CheckpointMismatchError:
    here, there = mine.described, saved.described
    assert mine.entries is not None
    assert saved.entries is not None
    pairs = enumerate(zip_longest(mine.entries(), saved.entries()))
    number, (one, other) = next(((n, pair) for n, pair in pairs if pair[0] != pair[1]), (0, (None, None)))
    return CheckpointMismatchError(
        f"model file {source}: layer {mine.layer!r} of the factory has another vocabulary than the trained "
        f"{saved.layer!r}. Entry {number} is {_shown(one)} in the factory, which has {here.size} entries, and "
        f"{_shown(other)} in the file, which has {there.size}. Give the layer the vocabulary, and the name, that "
        "it was trained with."
    )


def _shown(entry: bytes | None) -> str:
    return "missing" if entry is None else repr(entry.decode(errors="replace"))


def _of_archive(path: FilePath) -> list[_Vocabulary]:
    """Return the vocabularies of layers that keep them in the model's config, or, if adapted, in a file of the archive.

    Layers that another layer creates with a vocabulary are included without their entries.
    """
    with open_stream(path) as file, zipfile.ZipFile(file) as archive:
        config = json.loads(archive.read(_CONFIG))
        found = [vocabulary for kind, fields in _layers(config) for vocabulary in _of_config(kind, fields)]
        names = _names_by_place(archive)
        for name in archive.namelist():
            place = PurePosixPath(name).parent
            # A TextVectorization also writes the vocabulary of its lookup layer as its own.
            if PurePosixPath(name).name == _VOCABULARY and place.name != "_lookup_layer":
                entries = archive.read(name).split(b"\n")
                layer = names.get(str(place.relative_to("assets")), "")
                # In a list of layers, the place is named after the class, otherwise after an attribute.
                kind = _without_number(place.name) if place.parent.name == "layers" else _kind_of(layer)
                found.append(_Vocabulary(layer, kind, functools.partial(iter, entries)))
    known = {vocabulary.layer for vocabulary in found}
    unknown = [name for place, name in names.items() if name not in known and not place.endswith("/_lookup_layer")]
    return found + [_Vocabulary(name, _kind_of(name), None) for name in unknown if _kind_of(name)]


def _kind_of(name: str) -> str:
    """Return the class in a generated Keras name; "" for another name."""
    kind = _without_number(name)
    return kind if kind in _KINDS else ""


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _layers(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (class, config) of every object that `config` describes, at any depth."""
    if isinstance(config, Mapping):
        fields = config.get("config")
        if isinstance(config.get("class_name"), str) and isinstance(fields, Mapping):
            yield config["class_name"], fields
        for child in config.values():
            yield from _layers(child)
    elif isinstance(config, list):
        for child in config:
            yield from _layers(child)


def _of_config(class_name: str, fields: Mapping[str, Any]) -> Iterator[_Vocabulary]:
    kind, name = _snake(class_name), str(fields.get("name", ""))
    words = fields.get("vocabulary")
    if isinstance(words, list) and words and (class_name == "TextVectorization" or "num_oov_indices" in fields):
        is_text = class_name == "TextVectorization"  # the config of its lookup layer
        mask, oov, count = (
            ("", "[UNK]", 1) if is_text else [fields.get(k) for k in ("mask_token", "oov_token", "num_oov_indices")]
        )
        special = _special(mask, oov, int(count or 0), str(fields.get("output_mode") or "int"))
        entries = [str(word).encode() for word in words]
        if entries[: len(special)] == special:  # Keras accepts them with or without the special entries
            entries = entries[len(special) :]
        yield _Vocabulary(name, kind, lambda: special + entries)
    bounds = fields.get("bin_boundaries")
    if isinstance(bounds, list) and bounds:
        yield _Vocabulary(name, kind, lambda: [_boundary(bound) for bound in bounds])


def _names_by_place(archive: zipfile.ZipFile) -> dict[str, str]:
    """Return the names of layers by their places in the archive, from the groups of the weights."""
    import h5py

    names: dict[str, str] = {}

    def visit(path: str, node: Any) -> None:
        if path.endswith("/vars") and isinstance(node.attrs.get("name"), str):
            names[path.removesuffix("/vars")] = node.attrs["name"]

    if _WEIGHTS in archive.namelist():
        with h5py.File(archive.open(_WEIGHTS), "r") as weights:
            weights.visititems(visit)
    return names
