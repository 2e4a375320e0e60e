"""The vocabularies of a model's preprocessing layers: recorded in an export, and compared with those of the training.

They are no weights, so that the factory has to give them. Entry k is what the layer maps to k, masks and out of vocabulary
entries included, as `get_vocabulary()` lists them. Another order gives the rows of other words, without any error.

`checkpoint/keras/trained_vocabularies.py` says where a `.keras` file holds them. Of a layer that the code of a class makes with a
given vocabulary, the file has the name alone; it has the vocabulary only where the config of that class holds the same list.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

import keras
import tensorflow as tf

from tpuembed.checkpoint.keras.trained_vocabularies import (
    LayerVocabulary,
    boundary_entries,
    check_names,
    described_objects,
    digest,
    given_entries,
    hashing_of,
    is_model_file,
    read_vocabularies,
    shown_hashings,
    snake_case,
    special_entries,
)
from tpuembed.errors import CheckpointMismatchError, ConfigError, warn
from tpuembed.files import FilePath, as_path
from tpuembed.manifest import VocabularyEntry
from tpuembed.vocabulary import Vocabulary

__all__ = ["compare_vocabularies", "nodes_below", "vocabularies_of"]

_LOOKUPS: Final = (keras.layers.StringLookup, keras.layers.IntegerLookup)
_CHUNK: Final = 1 << 16
_Lists = dict[tuple[str, ...], list[Any]]


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


def _of_model(model: Any) -> list[LayerVocabulary]:
    nodes = nodes_below(model)
    vectorizers = [node for node in nodes if isinstance(node, keras.layers.TextVectorization)]
    owners = {id(owner._lookup_layer): owner for owner in vectorizers}
    found = []
    for node in nodes:
        owner = owners.get(id(node), node)
        if isinstance(node, _LOOKUPS):
            _check_is_there(node, owner)
            special = special_entries(node.mask_token, node.oov_token, node.num_oov_indices, node.output_mode)
            given = functools.partial(given_entries, special)
            kind, hashing = snake_case(type(owner).__name__), hashing_of(vars(node))
            found.append(LayerVocabulary(owner.name, kind, functools.partial(_entries, node), given, hashing))
        elif isinstance(node, keras.layers.Discretization) and node.bin_boundaries is not None:
            bounds = functools.partial(boundary_entries, list(node.bin_boundaries))
            found.append(LayerVocabulary(node.name, snake_case(type(node).__name__), bounds, boundary_entries))
    return sorted(found, key=lambda vocabulary: (vocabulary.layer, vocabulary.kind))


def _check_is_there(layer: Any, owner: Any) -> None:
    if layer.vocabulary_size() <= layer.num_oov_indices + 1 and not layer.get_vocabulary(include_special_tokens=False):
        raise ConfigError(
            f"model: layer {owner.name!r} has no vocabulary. A vocabulary is not a weight, so it is not restored. "
            "Set it in the factory."
        )


def _entries(layer: Any) -> Iterator[bytes]:
    """Yield the entries as `get_vocabulary` lists them. A list of millions of texts would take gigabytes."""
    keys, values = layer.lookup_table.export()
    words, numbers = (values, keys) if layer.invert else (keys, values)
    first = layer.vocabulary_size() - int(words.shape[0])
    special = special_entries(layer.mask_token, layer.oov_token, layer.num_oov_indices, layer.output_mode)
    yield from (special + [str(layer.oov_token).encode()] * first)[:first]
    words = tf.gather(words, tf.argsort(numbers))
    for start in range(0, int(words.shape[0]), _CHUNK):
        for word in words[start : start + _CHUNK].numpy().tolist():
            yield word if isinstance(word, bytes) else str(word).encode()


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
        given: table -> its names, where the factory gives them and the checkpoint has none; see `check_names`.

    Raises:
        CheckpointMismatchError: a vocabulary differs; the message says where.
        CheckpointCorruptError: the file's vocabularies cannot be read.
        ConfigError: as `vocabularies_of`.
    """
    mine, path = _of_model(model), as_path(source)
    if not (mine or given) or not is_model_file(path):
        return tuple(one.described for one in mine)
    config, saved = read_vocabularies(path, {one.layer for one in mine})
    pairs = _pairs(mine, saved, source)
    paired, taken = {one for one, _ in pairs}, {other for _, other in pairs}
    unclear = {one for one, _ in pairs if any(other.layer == one.layer and not _is_same(one, other) for other in saved)}
    equal = {
        one for one, other in pairs if other.entries is not None and (one.number is not None or one not in unclear)
    }
    left = [other for other in saved if other.entries is not None and other not in taken]
    if given:
        check_names(given, saved, source, "factory")
    if left:  # of a layer that was renamed, if it can be no other
        equal |= {one for one in mine if one not in paired and all(_is_same(one, other) for other in left)}
    equal |= _equal_in_configs([one for one in mine if one not in equal], model, config, source)
    unknown = [one for one in mine if one not in equal]
    if unknown:
        warn(_not_compared(unknown, left, source))
    return tuple(dataclasses.replace(one.described, compared=one in equal) for one in mine)


def _not_compared(unknown: Sequence[LayerVocabulary], left: Sequence[LayerVocabulary], source: str | FilePath) -> str:
    layers = ", ".join(repr(one.layer) for one in unknown)
    what = "vocabulary of layer" if len(unknown) == 1 else "vocabularies of layers"
    others = ", ".join(f"{one.layer!r} ({one.described.size} entries)" for one in left)
    rest = f". No layer of the factory has the vocabulary of {others} in the file: give a renamed layer its old name"
    return (
        f"model file {source}: the {what} {layers} of the factory cannot be compared with the training: the file does not say it"
        f"{rest if left else ''}. If it differs, the export answers with the rows of other words. Make sure that it is the same"
    )


def _is_same(mine: LayerVocabulary, saved: LayerVocabulary) -> bool:
    """Returns True if they are equal, as far as the file has the entries."""
    if saved.entries is not None and mine.described.sha256 != saved.described.sha256:
        return False
    return None in (mine.hashing, saved.hashing) or mine.hashing == saved.hashing


def _pairs(
    mine: Sequence[LayerVocabulary], saved: Sequence[LayerVocabulary], source: str | FilePath
) -> list[tuple[LayerVocabulary, LayerVocabulary]]:
    """Layers of the factory with those of the file, whose vocabularies are equal, or not known.

    Raises:
        CheckpointMismatchError: see `compare_vocabularies`.
    """
    by_name: dict[str, list[LayerVocabulary]] = {}
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
    mine: Sequence[LayerVocabulary], saved: Sequence[LayerVocabulary], source: str | FilePath
) -> list[tuple[LayerVocabulary, LayerVocabulary]]:
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


def _nearest(one: LayerVocabulary, others: Sequence[LayerVocabulary]) -> LayerVocabulary:
    """One of `others` that a message compares `one` with: whose entries are known, and of its class, if there is one."""
    return min(others, key=lambda other: (other.entries is None, other.kind != one.kind))


def _made_as(vocabulary: LayerVocabulary) -> tuple[str, int, str]:
    """Return a sort key that orders layers of one class by their generated numbers, and so by creation."""
    number = vocabulary.number
    return vocabulary.kind, -1 if number is None else number, vocabulary.layer


def _differs(
    mine: LayerVocabulary, saved: LayerVocabulary, source: str | FilePath, where: str = ""
) -> CheckpointMismatchError:
    than = where or f"the trained {saved.layer!r}"
    begin = f"model file {source}: layer {mine.layer!r} of the factory has another vocabulary than {than}. "
    end = "Give the layer the vocabulary and the name that it was trained with."
    if mine.entries is None or saved.entries is None:
        return CheckpointMismatchError(f"{begin}They are made in another order than in the file. {end}")
    here, there = mine.described, saved.described
    if here.sha256 == there.sha256:
        hashings = shown_hashings(mine.hashing, saved.hashing, "factory")
        return CheckpointMismatchError(
            f"{begin}Unknown words get their entries {hashings}. Give the layer the salt and "
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


def _equal_in_configs(
    mine: Sequence[LayerVocabulary], model: Any, saved: Any, source: str | FilePath
) -> set[LayerVocabulary]:
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
    equal = set[LayerVocabulary]()
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
            raise _differs(vocabulary, LayerVocabulary("", "", functools.partial(iter, entries)), source, where)
    return equal


def _entries_in(vocabulary: LayerVocabulary, words: list[Any]) -> list[bytes]:
    assert vocabulary.entries_of is not None
    try:
        return vocabulary.entries_of(words)
    except (TypeError, ValueError):  # a list of something else
        return []


def _is_digest_of(vocabulary: LayerVocabulary, entries: list[bytes]) -> bool:
    return len(entries) == vocabulary.described.size and digest(entries)[0] == vocabulary.described.sha256


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
    for described, fields in described_objects(config):
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
