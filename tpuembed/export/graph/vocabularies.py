"""The vocabularies of a model's preprocessing layers: recorded in an export, and compared with those of the training.

They are no weights, so that the factory has to give them. Entry k is what the layer maps to k, masks and out of vocabulary
entries included, as `get_vocabulary()` lists them. Another order gives the rows of other words, without any error.

Where a `.keras` file holds a vocabulary: in `vocabulary.txt` among its assets, if the layer was adapted, wherever the layer is; in
the config of the layer, if it was given, and the layer's config is in the model's (functional and sequential models, nested ones,
and objects whose own config holds layers). Of a layer that the code of a class makes with a given vocabulary, the file has the
name alone, beside the weights. Its vocabulary is in the file only where the config of that class holds the same list.
"""

import dataclasses
import functools
import hashlib
import json
import operator
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import PurePosixPath
from typing import IO, Any, Final

import keras
import numpy as np
import tensorflow as tf

from tpuembed.checkpoint.keras.vocabularies import words_of
from tpuembed.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError, warn
from tpuembed.export.graph.layer_graphs import snake_case
from tpuembed.files import FilePath, as_path, names_below, open_stream
from tpuembed.manifest import VocabularyEntry
from tpuembed.vocabulary import Vocabulary

__all__ = ["compare_vocabularies", "nodes_below", "vocabularies_of"]

_LOOKUPS: Final = (keras.layers.StringLookup, keras.layers.IntegerLookup)
_CHUNK: Final = 1 << 16
_CONFIG, _WEIGHTS, _VOCABULARY = "config.json", "model.weights.h5", "vocabulary.txt"
_KINDS: Final = ("string_lookup", "integer_lookup", "text_vectorization")

_REMEDY: Final = (
    "Take them from there with read_vocabulary, or make the lookup layer in the factory too. If set_vocabulary replaced the list "
    "that the layer was made with, Keras saved the old one: then export from a TensorFlow checkpoint"
)

_Lists = dict[tuple[str, ...], list[Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class _Vocabulary:
    """One vocabulary.

    Attributes:
        layer: the layer's name; "" if it is not known.
        kind: its class, in snake case.
        entries: gives them as UTF-8, in the order of their numbers; None where they are not known.
        entries_of: of a layer of the factory: the entries that it would have if it were given a list.
        hashing: how an unknown word gets one of several entries, "" if there are not several; None where it is not known. It has
            the salt, which no message shows.
        buckets: how many entries of unknown words it begins with; -1 if a mask is before them; None where it is not known.
    """

    layer: str
    kind: str
    entries: Callable[[], Iterable[bytes]] | None
    entries_of: Callable[[list[Any]], list[bytes]] | None = None
    hashing: str | None = None
    buckets: int | None = None

    @functools.cached_property
    def described(self) -> VocabularyEntry:
        """Its size and its digest, which reads all of it."""
        digest, size = _digest(self.entries() if self.entries else ())
        return VocabularyEntry(layer=self.layer, size=size, sha256=digest)

    @property
    def number(self) -> int | None:
        """Return the number in a generated Keras name: 0 for string_lookup, 3 for string_lookup_3; None for a user's
        name.
        """
        match = re.fullmatch(rf"{re.escape(self.kind)}(?:_(\d+))?", self.layer) if self.kind else None
        return int(match[1] or 0) if match else None


def _digest(entries: Iterable[bytes]) -> tuple[str, int]:
    """The digest of entries, and how many they are."""
    digest, size = hashlib.sha256(), 0
    for entry in entries:
        digest.update(b"%d:%s," % (len(entry), entry))
        size += 1
    return digest.hexdigest(), size


def vocabularies_of(model: Any) -> tuple[VocabularyEntry, ...]:
    """Size and digest of each vocabulary of a trained model itself, by the names of its layers.

    Raises:
        ConfigError: a layer has no vocabulary, so every value would be out of vocabulary.
    """
    return tuple(dataclasses.replace(vocabulary.described, compared=True) for vocabulary in _of_model(model))


def nodes_below(model: Any) -> list[Any]:
    """Returns the model and all that is tracked below it: by TensorFlow, and by Keras alone, as layers in lists and dicts are."""
    found: dict[int, Any] = {}
    for root in (model, *model._flatten_layers(include_self=False)):
        if id(root) not in found:
            found |= {id(node): node for node in tf.train.TrackableView(root).descendants()}
    return list(found.values())


def _of_model(model: Any) -> list[_Vocabulary]:
    nodes = nodes_below(model)
    vectorizers = [node for node in nodes if isinstance(node, keras.layers.TextVectorization)]
    owners = {id(owner._lookup_layer): owner for owner in vectorizers}
    found = []
    for node in nodes:
        owner = owners.get(id(node), node)
        if isinstance(node, _LOOKUPS):
            _check_is_there(node, owner)
            special = _special(node.mask_token, node.oov_token, node.num_oov_indices, node.output_mode)
            given = functools.partial(_given, special)
            kind, hashing = snake_case(type(owner).__name__), _hashing(vars(node))
            found.append(_Vocabulary(owner.name, kind, functools.partial(_entries, node), given, hashing))
        elif isinstance(node, keras.layers.Discretization) and node.bin_boundaries is not None:
            bounds = functools.partial(_boundaries, list(node.bin_boundaries))
            found.append(_Vocabulary(node.name, snake_case(type(node).__name__), bounds, _boundaries))
    return sorted(found, key=lambda vocabulary: (vocabulary.layer, vocabulary.kind))


def _check_is_there(layer: Any, owner: Any) -> None:
    if layer.vocabulary_size() <= layer.num_oov_indices + 1 and not layer.get_vocabulary(include_special_tokens=False):
        raise ConfigError(
            f"model: layer {owner.name!r} has no vocabulary. A vocabulary is not a weight, so it is not restored. "
            "Set it in the factory."
        )


def _boundaries(bounds: Iterable[Any]) -> list[bytes]:
    return [repr(float(np.float32(bound))).encode() for bound in bounds]


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


def _hashing(settings: Mapping[str, Any]) -> str:
    """Return how a layer with these settings chooses the entry of an unknown word, if it has several for them.

    Source: keras/src/layers/preprocessing/index_lookup.py, `_lookup_dense`.
    """
    if int(settings.get("num_oov_indices") or 0) <= 1:
        return ""
    salt = settings.get("salt")
    salted = "without a salt" if salt is None else f"with salt {[salt, salt] if isinstance(salt, int) else list(salt)}"
    is_text = settings.get("vocabulary_dtype", "string") == "string"  # configs of StringLookup have none
    return f"hash of text {salted}" if is_text else f"{settings.get('oov_method') or 'floormod'} of integers {salted}"


def _buckets(fields: Mapping[str, Any]) -> int:
    """Return `_Vocabulary.buckets` of a lookup layer's config."""
    has_mask = fields.get("mask_token") is not None and (fields.get("output_mode") or "int") == "int"
    return -1 if has_mask else int(fields.get("num_oov_indices") or 0)


def _hashing_of(vocabulary: Vocabulary) -> str:
    names = {"num_oov_indices": vocabulary.oov_buckets, "vocabulary_dtype": vocabulary.dtype}
    return _hashing({**names, "salt": vocabulary.oov_key})


def _shown_hashings(mine: str | None, saved: str | None) -> str:
    """Return both for a message, without the salts, which are secrets."""
    here, there = (re.sub(r"with salt .*", "with a salt", one or "no hash") for one in (mine, saved))
    return f"by {here} in the factory, and by {there if here != there else 'one with another salt'} in the file"


def _given(special: list[bytes], words: Iterable[Any]) -> list[bytes]:
    """The entries of a layer that is given `words`; Keras takes them with the special ones or without."""
    entries = [str(word).encode() for word in words]
    return special + (entries[len(special) :] if entries[: len(special)] == special else entries)


# ---- of a `.keras` file


def compare_vocabularies(
    model: Any, source: str | FilePath, given: Mapping[str, Vocabulary] | None = None
) -> tuple[VocabularyEntry, ...]:
    """Size and digest of each vocabulary of `model`, compared with those in the `.keras` file or folder that it was saved in.

    A layer with a name of its own is compared with the layer of that name. Layers whose names Keras has numbered must have the
    file's vocabularies in the order in which the layers were made: all of them, or some where the factory makes fewer. Where the
    factory makes more, those of the file must be among them. A vocabulary that the file does not hold is compared with the list in
    the config of the class that made it, if there is one. A warning names the layers that are compared with nothing.

    Other sources hold no vocabularies: nothing is compared, and there is no warning.

    Args:
        model: of the factory.
        source: the checkpoint.
        given: table -> its names, where the factory gives them and the checkpoint has none. If the file says which lookup's outputs
            are the table's ids, the names must be those of the lookup, in the same order. A warning names the other tables.

    Raises:
        CheckpointMismatchError: a vocabulary differs; the message says where.
        CheckpointCorruptError: the file's vocabularies cannot be read.
        ConfigError: as `vocabularies_of`.
    """
    mine, path = _of_model(model), as_path(source)
    if not (mine or given) or not path.is_file() or not (path.suffix == ".keras" or _is_unzipped(path)):
        return tuple(one.described for one in mine)
    config, saved = _of_file(path, {one.layer for one in mine})
    pairs = _pairs(mine, saved, source)
    paired, taken = {one for one, _ in pairs}, {other for _, other in pairs}
    unclear = {one for one, _ in pairs if any(other.layer == one.layer and not _is_same(one, other) for other in saved)}
    equal = {
        one for one, other in pairs if other.entries is not None and (one.number is not None or one not in unclear)
    }
    left = [other for other in saved if other.entries is not None and other not in taken]
    if given:
        _check_given(given, config, saved, source)
    if left:  # of a layer that was renamed, if it can be no other
        equal |= {one for one in mine if one not in paired and all(_is_same(one, other) for other in left)}
    equal |= _equal_in_configs([one for one in mine if one not in equal], model, config, source)
    unknown = [one for one in mine if one not in equal]
    if unknown:
        warn(_not_compared(unknown, left, source))
    return tuple(dataclasses.replace(one.described, compared=one in equal) for one in mine)


def _check_given(
    given: Mapping[str, Vocabulary], config: Any, saved: Sequence[_Vocabulary], source: str | FilePath
) -> None:
    """Compare names that the factory gives with the trained model's lookups. A warning names the tables that this cannot prove.

    Args:
        given, source: see `compare_vocabularies`.
        config: the trained model's.
        saved: the file's vocabularies.

    Raises:
        CheckpointMismatchError: the names of a table, or the rows of its unknown names, are those of none of its lookups.
    """
    of_tables, unproven = _lookups_of_tables(config, saved), []
    for table, vocabulary in given.items():
        lookups = of_tables.get(table, [None])
        known = [one for one in lookups if one is not None]
        names: list[bytes | None] = _of_names(vocabulary) if known else []
        hashing = _hashing_of(vocabulary)
        same = [one for one in known if _has_names(one, vocabulary, names)]
        fits = [one for one in same if one.hashing == hashing]
        if len(fits) == len(lookups):
            continue
        if fits or len(known) < len(lookups):
            unproven.append(table)
        elif same:
            raise CheckpointMismatchError(
                f"model file {source}: unknown names of table {table!r} get rows {_shown_hashings(hashing, same[0].hashing)}, of "
                f"layer {same[0].layer!r}. {_REMEDY}"
            )
        else:
            shown = dict.fromkeys(f"{one.layer!r} ({_shown_size(one)})" for one in known)
            raise CheckpointMismatchError(
                f"model file {source}: the factory gives the names of table {table!r}, {len(names)} after {vocabulary.oov_buckets} "
                f"rows for unknown ones, and the file has others, of layer {', '.join(shown)}. {_REMEDY}"
            )
    if unproven:
        tables = ", ".join(map(repr, unproven))
        warn(
            f"model file {source}: the names that the factory gives cannot be compared with the training: the file does not say "
            f"which names the rows of {f'table {tables}' if len(unproven) == 1 else f'tables {tables}'} had. If they differ, the "
            "export answers with the rows of other names. Make sure that they are the same"
        )


def _shown_size(lookup: _Vocabulary) -> str:
    if lookup.buckets == -1:
        return f"{lookup.described.size} entries, with a mask before the names"
    return f"{lookup.described.size - (lookup.buckets or 0)} after {lookup.buckets}"


def _lookups_of_tables(config: Any, saved: Sequence[_Vocabulary]) -> dict[str, list[_Vocabulary | None]]:
    """Return table -> the lookups whose outputs are the ids of its features, in all calls of its layer.

    They are known where our layer takes the output of Keras' own StringLookup or IntegerLookup itself, and that takes an input of
    the model, which is functional or sequential, as are models inside of it. None stands for every other feature.
    """
    calls, of_inputs = dict[int, list[Any]](), set[int]()
    _walk(config, True, calls, of_inputs)
    found: dict[str, list[_Vocabulary | None]] = {}
    for described, fields in _described(config):
        features = fields.get("feature_config")
        if not isinstance(features, Mapping):
            continue
        is_ours = str(described.get("registered_name")).startswith("tpuembed>")
        for call in (calls.get(id(fields)) if is_ours else None) or [None]:
            for table, layer in _links(features.get("features"), call):
                lookup = None if id(layer) not in of_inputs else _of_lookup(layer, saved)
                if lookup not in found.setdefault(table, []):
                    found[table].append(lookup)
    return found


def _walk(model: Any, takes_inputs: bool, calls: dict[int, list[Any]], of_inputs: set[int]) -> None:
    """Find what the layers of a functional or sequential model take, and those of the models inside of it.

    A model in the config of another class is left out: that class may call its layers in another way.

    Args:
        model: as a config describes it.
        takes_inputs: its inputs are those of the whole model.
        calls: gets the layers that each call of a layer takes, by the identity of the layer's config.
        of_inputs: gets the identities of the layers that take nothing but inputs of the whole model.
    """
    is_model = isinstance(model, Mapping) and model.get("class_name") in ("Functional", "Sequential")
    fields = model.get("config") if is_model and _is_of_keras(model) else None
    listed = fields.get("layers") if isinstance(fields, Mapping) else None
    layers = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    by_name = {str(layer.get("name")): layer for layer in layers}
    for before, layer in zip([None, *layers], layers, strict=False):
        if model["class_name"] == "Sequential":
            taken = [before]
            is_first = before is None or before.get("class_name") == "InputLayer"
        else:
            taken = _taken(layer.get("inbound_nodes"), by_name)
            is_first = bool(taken) and all(map(_is_input, taken))
        calls.setdefault(id(layer.get("config")), []).extend(taken)
        if takes_inputs and is_first:
            of_inputs.add(id(layer))
        _walk(layer, takes_inputs and is_first, calls, of_inputs)


def _is_input(taken: Any) -> bool:
    """Return True if a call takes inputs of its model alone; see `_taken`."""
    if isinstance(taken, Mapping) and isinstance(taken.get("class_name"), str):
        return bool(taken["class_name"] == "InputLayer")
    children = list(taken.values()) if isinstance(taken, Mapping) else taken if isinstance(taken, list) else []
    return bool(children) and all(map(_is_input, children))


def _is_of_keras(described: Mapping[str, Any]) -> bool:
    """Return True if Keras itself has the class of an object in a config: a user's subclass may call it in another way."""
    is_registered = described.get("registered_name") not in (None, described.get("class_name"))
    return str(described.get("module")).partition(".")[0] == "keras" and not is_registered


def _taken(nodes: Any, layers: Mapping[str, Any]) -> list[Any]:
    """Return what each call of a layer of a functional model takes: the layers whose outputs they are, in its structure."""

    def taken(argument: Any) -> Any:
        if isinstance(argument, list):
            return [taken(each) for each in argument]
        if not isinstance(argument, Mapping):
            return None
        if argument.get("class_name") == "__keras_tensor__":
            config = argument.get("config")
            history = config.get("keras_history") if isinstance(config, Mapping) else None
            return layers.get(str(history[0])) if isinstance(history, list) and history else None
        if argument.get("class_name") == "__tuple__":
            return taken(argument.get("items"))
        return {key: taken(each) for key, each in argument.items()}

    all_arguments = [node.get("args") for node in nodes or () if isinstance(node, Mapping)]
    return [taken(one[0]) if isinstance(one, list) and one else None for one in all_arguments]


def _links(features: Any, taken: Any) -> Iterator[tuple[str, Any]]:
    """Yield the table of each saved feature, and the layer in its place of `taken`, which may have another structure: None."""
    is_layer = isinstance(taken, Mapping) and isinstance(taken.get("class_name"), str)
    if isinstance(features, Mapping) and isinstance(features.get("table"), str):
        yield features["table"], taken if is_layer else None
    elif isinstance(features, Mapping):
        for key, feature in features.items():
            yield from _links(feature, taken.get(key) if isinstance(taken, Mapping) and not is_layer else None)
    elif isinstance(features, list):
        is_list = isinstance(taken, list) and len(taken) == len(features)
        for place, feature in enumerate(features):
            yield from _links(feature, taken[place] if is_list else None)


def _of_lookup(layer: Mapping[str, Any], saved: Sequence[_Vocabulary]) -> _Vocabulary | None:
    """Return the vocabulary of a Keras lookup: the one of its config, or an adapted one. None for another or unknown one."""
    kind, fields = layer["class_name"], layer.get("config")
    if kind not in ("StringLookup", "IntegerLookup") or not _is_of_keras(layer) or not isinstance(fields, Mapping):
        return None
    if (fields.get("output_mode") or "int") != "int" or fields.get("invert"):
        return None
    adapted = [one for one in saved if one.layer == fields.get("name") and None not in (one.entries, one.buckets)]
    return next(_of_config(kind, fields), adapted[0] if len(adapted) == 1 else None)


def _of_names(vocabulary: Vocabulary) -> list[bytes | None]:
    """Return the names of all rows after the buckets, None for free ones."""
    names = vocabulary.names(np.arange(vocabulary.oov_buckets, vocabulary.rows))
    return [name if name is None or isinstance(name, bytes) else str(name).encode() for name in names]


def _has_names(saved: _Vocabulary, vocabulary: Vocabulary, names: list[bytes | None]) -> bool:
    """Return True if `saved` gives each of `names` the row that `vocabulary` does. What it calls its buckets is its own."""
    assert saved.entries is not None
    buckets = vocabulary.oov_buckets
    if saved.buckets != buckets or saved.described.size != buckets + len(names):
        return False
    return all(map(operator.eq, islice(saved.entries(), buckets, None), names))


def _not_compared(unknown: Sequence[_Vocabulary], left: Sequence[_Vocabulary], source: str | FilePath) -> str:
    layers = ", ".join(repr(one.layer) for one in unknown)
    what = "vocabulary of layer" if len(unknown) == 1 else "vocabularies of layers"
    others = ", ".join(f"{one.layer!r} ({one.described.size} entries)" for one in left)
    rest = f". No layer of the factory has the vocabulary of {others} in the file: give a renamed layer its old name"
    return (
        f"model file {source}: the {what} {layers} of the factory cannot be compared with the training: the file does not say it"
        f"{rest if left else ''}. If it differs, the export answers with the rows of other words. Make sure that it is the same"
    )


def _is_same(mine: _Vocabulary, saved: _Vocabulary) -> bool:
    """Returns True if they are equal, as far as the file has the entries."""
    if saved.entries is not None and mine.described.sha256 != saved.described.sha256:
        return False
    return None in (mine.hashing, saved.hashing) or mine.hashing == saved.hashing


def _pairs(
    mine: Sequence[_Vocabulary], saved: Sequence[_Vocabulary], source: str | FilePath
) -> list[tuple[_Vocabulary, _Vocabulary]]:
    """Layers of the factory with those of the file, whose vocabularies are equal, or not known.

    Raises:
        CheckpointMismatchError: see `compare_vocabularies`.
    """
    by_name: dict[str, list[_Vocabulary]] = {}
    for vocabulary in saved:
        if vocabulary.number is None and vocabulary.layer:
            by_name.setdefault(vocabulary.layer, []).append(vocabulary)
    rest, pairs = [], []
    for vocabulary in mine:
        if vocabulary.number is not None or vocabulary.layer not in by_name:
            rest.append(vocabulary)
            continue
        same = next((one for one in by_name[vocabulary.layer] if _is_same(vocabulary, one)), None)
        if same is None:
            raise _differs(vocabulary, by_name[vocabulary.layer][0], source)
        pairs.append((vocabulary, same))
    left = [one for one in saved if one.layer not in by_name]
    if any(vocabulary.number is not None for vocabulary in rest):
        names = {vocabulary.layer for vocabulary in mine}
        left += [one for name, named in by_name.items() if name not in names for one in named]
    return pairs + _pairs_in_order(rest, left, source)


def _pairs_in_order(
    mine: Sequence[_Vocabulary], saved: Sequence[_Vocabulary], source: str | FilePath
) -> list[tuple[_Vocabulary, _Vocabulary]]:
    """Pair layers that are not in the file by a name of their own with `saved`, which no name has taken.

    Layers with generated names are compared first, in order. A layer with a user's name must then equal one of the
    rest, or be new.
    """
    numbered, left = sorted((one for one in mine if one.number is not None), key=_made_as), sorted(saved, key=_made_as)
    pairs, begin = [], 0
    if len(numbered) <= len(left):
        for one in numbered:
            places = [begin] if len(numbered) == len(saved) else range(begin, len(left))
            found = next((place for place in places if _is_same(one, left[place])), None)
            if found is None:
                raise _differs(one, _nearest(one, [left[place] for place in places] or saved), source)
            pairs.append((one, left[found]))
            begin = found + 1
    else:  # the factory has added some, to all of the file's
        for other in left:
            found = next((place for place in range(begin, len(numbered)) if _is_same(numbered[place], other)), None)
            if found is None:
                raise _differs(_nearest(other, numbered), other, source)
            pairs.append((numbered[found], other))
            begin = found + 1
    left = [one for one in left if all(one is not other for _, other in pairs)]
    for one in mine:
        if one.number is None and left:
            found = next((place for place, other in enumerate(left) if _is_same(one, other)), None)
            if found is None:
                raise _differs(one, _nearest(one, left), source)
            pairs.append((one, left.pop(found)))
    return pairs


def _nearest(one: _Vocabulary, others: Sequence[_Vocabulary]) -> _Vocabulary:
    """One of `others` that a message compares `one` with: whose entries are known, and of its class, if there is one."""
    return min(others, key=lambda other: (other.entries is None, other.kind != one.kind))


def _made_as(vocabulary: _Vocabulary) -> tuple[str, int, str]:
    """Return a sort key that orders layers of one class by their generated numbers, and so by creation."""
    number = vocabulary.number
    return vocabulary.kind, -1 if number is None else number, vocabulary.layer


def _differs(mine: _Vocabulary, saved: _Vocabulary, source: str | FilePath, where: str = "") -> CheckpointMismatchError:
    than = where or f"the trained {saved.layer!r}"
    begin = f"model file {source}: layer {mine.layer!r} of the factory has another vocabulary than {than}. "
    end = "Give the layer the vocabulary and the name that it was trained with."
    if mine.entries is None or saved.entries is None:
        return CheckpointMismatchError(f"{begin}They are made in another order than in the file. {end}")
    here, there = mine.described, saved.described
    if here.sha256 == there.sha256:
        return CheckpointMismatchError(
            f"{begin}Unknown words get their entries {_shown_hashings(mine.hashing, saved.hashing)}. Give the layer the salt and "
            "oov_method that it was trained with."
        )
    pairs = enumerate(zip_longest(mine.entries(), saved.entries()))
    number, (one, other) = next(((n, pair) for n, pair in pairs if pair[0] != pair[1]), (0, (None, None)))
    return CheckpointMismatchError(
        f"{begin}Entry {number} is {_shown(one)} in the factory, which has {here.size} entries, and {_shown(other)} in the file, "
        f"which has {there.size}. {end}"
    )


def _shown(entry: bytes | None) -> str:
    return "missing" if entry is None else repr(entry.decode(errors="replace"))


class _Folder:
    """The files of a model that was saved unzipped, as `zipfile.ZipFile` offers them."""

    def __init__(self, folder: FilePath) -> None:
        self._folder = folder

    def namelist(self) -> list[str]:
        return names_below(self._folder)

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def open(self, name: str) -> IO[bytes]:
        return open_stream(self._folder / name)


def _is_unzipped(path: FilePath) -> bool:
    """Returns True if `path` has the weights of a model that was saved unzipped."""
    return path.name == _WEIGHTS and (path.parent / _CONFIG).is_file()


def _of_file(path: FilePath, layers: Iterable[str]) -> tuple[Any, list[_Vocabulary]]:
    """The config and the vocabularies of a saved model; see the module.

    Layers whose names alone are known, as theirs that code made with a vocabulary, are there without their entries: those that
    Keras has numbered, and those called like one of `layers`.

    Raises:
        CheckpointCorruptError: they cannot be read.
    """
    if _is_unzipped(path):
        return _of_archive(_Folder(path.parent), layers)
    try:
        with open_stream(path) as file, zipfile.ZipFile(file) as archive:
            return _of_archive(archive, layers)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise CheckpointCorruptError.of(f"model file {path}: cannot be unpacked: {error}") from None


def _of_archive(archive: zipfile.ZipFile | _Folder, layers: Iterable[str]) -> tuple[Any, list[_Vocabulary]]:
    config = json.loads(archive.read(_CONFIG))
    objects = [(str(described["class_name"]), fields) for described, fields in _described(config)]
    found = [vocabulary for class_name, fields in objects for vocabulary in _of_config(class_name, fields)]
    adapted: dict[str, set[tuple[str, int]]] = {}
    for _, fields in objects:
        if "num_oov_indices" in fields:
            adapted.setdefault(str(fields.get("name")), set()).add((_hashing(fields), _buckets(fields)))
    names = _names_by_place(archive)
    for name in archive.namelist():
        place = PurePosixPath(name).parent
        # A TextVectorization writes the vocabulary of its lookup layer a second time, as its own.
        if PurePosixPath(name).name == _VOCABULARY and place.name != "_lookup_layer":
            entries = archive.read(name).split(b"\n")
            layer = names.get(str(place.relative_to("assets")), "")
            # In a list of layers the place is called by the class, else by an attribute.
            kind = _without_number(place.name) if place.parent.name == "layers" else _kind_of(layer)
            options = list(adapted.get(layer, ()))  # several, if layers in several models have this name
            hashing, buckets = options[0] if len(options) == 1 else (None, None)
            found.append(_Vocabulary(layer, kind, functools.partial(iter, entries), hashing=hashing, buckets=buckets))
    # A layer that two of the config's models share is in it twice.
    kept = {
        (one.layer or str(number), one.kind, one.described.sha256, one.hashing): one for number, one in enumerate(found)
    }
    known = {vocabulary.layer for vocabulary in found}
    others = {name for place, name in names.items() if name not in known and not place.endswith("/_lookup_layer")}
    nameless = [name for name in sorted(others) if _kind_of(name) or name in layers]
    return config, [*kept.values(), *(_Vocabulary(name, _kind_of(name), None) for name in nameless)]


def _kind_of(name: str) -> str:
    """Return the class in a generated Keras name; "" for another name."""
    kind = _without_number(name)
    return kind if kind in _KINDS else ""


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _described(config: Any) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """(description, config) of every object that `config` describes, at any depth."""
    if isinstance(config, Mapping):
        fields = config.get("config")
        if isinstance(config.get("class_name"), str) and isinstance(fields, Mapping):
            yield config, fields
        for child in config.values():
            yield from _described(child)
    elif isinstance(config, list):
        for child in config:
            yield from _described(child)


def _of_config(class_name: str, fields: Mapping[str, Any]) -> Iterator[_Vocabulary]:
    kind, name = snake_case(class_name), str(fields.get("name", ""))
    words = words_of(fields)
    if words and (class_name == "TextVectorization" or "num_oov_indices" in fields):
        is_text = class_name == "TextVectorization"  # the config of its lookup layer
        mask, oov, count = (
            ("", "[UNK]", 1) if is_text else [fields.get(k) for k in ("mask_token", "oov_token", "num_oov_indices")]
        )
        special = _special(mask, oov, int(count or 0), str(fields.get("output_mode") or "int"))
        hashing, buckets = ("", None) if is_text else (_hashing(fields), _buckets(fields))
        yield _Vocabulary(name, kind, functools.partial(_given, special, words), hashing=hashing, buckets=buckets)
    bounds = fields.get("bin_boundaries")
    if isinstance(bounds, list) and bounds:
        yield _Vocabulary(name, kind, functools.partial(_boundaries, bounds))


def _names_by_place(archive: zipfile.ZipFile | _Folder) -> dict[str, str]:
    """The names of layers by their places in the archive, as the weights' groups have them."""
    import h5py

    names: dict[str, str] = {}

    def visit(path: str, node: Any) -> None:
        if path.endswith("/vars") and isinstance(node.attrs.get("name"), str):
            names[path.removesuffix("/vars")] = node.attrs["name"]

    if _WEIGHTS in archive.namelist():
        with archive.open(_WEIGHTS) as file, h5py.File(file, "r") as weights:
            weights.visititems(visit)
    return names


# ---- of classes that hold a list in a config of their own


@dataclasses.dataclass(frozen=True)
class _Object:
    """An object of a class that is neither Keras' nor ours, as a config describes it.

    Attributes:
        kind: its registered class.
        name: its own name; "" where it has none, or one that Keras made.
        lists: in its config, by the path of their keys.
    """

    kind: str
    name: str
    lists: _Lists


def _equal_in_configs(mine: Sequence[_Vocabulary], model: Any, saved: Any, source: str | FilePath) -> set[_Vocabulary]:
    """Those of `mine` that a class of the model has in its config, where the saved config has the same list in the same place.

    Raises:
        CheckpointMismatchError: the saved config has another list there.
    """
    if not mine:
        return set()
    try:
        config = keras.saving.serialize_keras_object(model)
    except Exception:  # whatever the model's own get_config raises
        return set()
    objects = _same_objects(list(_objects(config)), list(_objects(saved)))
    equal = set[_Vocabulary]()
    for vocabulary in mine:
        places = [
            (
                f"the config of the trained {here.kind} has in {'/'.join(path)!r}",
                _entries_in(vocabulary, there.lists[path]),
            )
            for here, there in objects
            for path, words in here.lists.items()
            if path in there.lists and _is_digest_of(vocabulary, _entries_in(vocabulary, words))
        ]
        others = [place for place in places if not _is_digest_of(vocabulary, place[1])]
        if places and not others:
            equal.add(vocabulary)
        elif places and len(others) == len(places):
            where, entries = others[0]
            raise _differs(vocabulary, _Vocabulary("", "", functools.partial(iter, entries)), source, where)
    return equal


def _entries_in(vocabulary: _Vocabulary, words: list[Any]) -> list[bytes]:
    assert vocabulary.entries_of is not None
    try:
        return vocabulary.entries_of(words)
    except (TypeError, ValueError):  # a list of something else
        return []


def _is_digest_of(vocabulary: _Vocabulary, entries: list[bytes]) -> bool:
    return len(entries) == vocabulary.described.size and _digest(entries)[0] == vocabulary.described.sha256


def _same_objects(here: Sequence[_Object], there: Sequence[_Object]) -> list[tuple[_Object, _Object]]:
    """Pairs of one class and one name; and of what is left of a class the only object of either side, if one has no name."""
    by_name = {(one.kind, one.name): one for one in there if one.name}
    for one in there:  # two of one name, in models inside of the model
        if one.name and by_name.get((one.kind, one.name), one).lists != one.lists:
            del by_name[one.kind, one.name]
    pairs = [(one, by_name[one.kind, one.name]) for one in here if (one.kind, one.name) in by_name]
    taken = {(one.kind, one.name) for one, _ in pairs}
    left_here, left_there = ([one for one in side if (one.kind, one.name) not in taken] for side in (here, there))
    for kind in dict.fromkeys(one.kind for one in left_here):
        mine, saved = ([one for one in side if one.kind == kind] for side in (left_here, left_there))
        if len(mine) == len(saved) == 1 and not (mine[0].name and saved[0].name):
            pairs.append((mine[0], saved[0]))
    return pairs


def _objects(config: Any) -> Iterator[_Object]:
    for described, fields in _described(config):
        class_name = str(described["class_name"])
        kind = str(described.get("registered_name") or class_name)
        package = str(described.get("module") or kind).partition(".")[0]
        if class_name.startswith("__") or package == "keras" or kind.startswith("tpuembed"):
            continue
        # A functional model's config has the names of its layers beside their configs.
        name = str(fields.get("name") or described.get("name") or "")
        lists: _Lists = {}
        _collect_lists(fields, (), lists)
        is_made = re.fullmatch(rf"{re.escape(snake_case(class_name))}(_\d+)?", name)
        yield _Object(kind, "" if is_made else name, lists)


def _collect_lists(node: Any, path: tuple[str, ...], out: _Lists) -> None:
    """Add the lists of texts and numbers in `node`, but for those in objects that it describes."""
    if isinstance(node, Mapping):
        if path and _is_described(node):
            return
        for key, child in node.items():
            _collect_lists(child, (*path, str(key)), out)
    elif isinstance(node, list | tuple):
        if node and all(isinstance(item, str | int | float) for item in node):
            out[path] = list(node)
        else:
            for number, child in enumerate(node):
                _collect_lists(child, (*path, str(number)), out)


def _is_described(node: Mapping[str, Any]) -> bool:
    """Returns True for an object with a config. Keras writes tuples and arrays in this form too, as __tuple__ and the like."""
    kind = node.get("class_name")
    return isinstance(kind, str) and not kind.startswith("__") and isinstance(node.get("config"), Mapping)
