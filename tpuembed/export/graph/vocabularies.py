"""The vocabularies of a model's preprocessing layers: recorded in an export, and compared with those of the training.

They are no weights, so that the factory has to give them. Entry k is what the layer maps to k, masks and out of vocabulary
entries included, as `get_vocabulary()` lists them. Another order gives the rows of other words, without any error.

`vocabulary/model_files.py` says where a `.keras` file holds them. Of a layer that the code of a class makes with a
given vocabulary, the file has the name alone.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

import keras
import tensorflow as tf

from tpuembed.checkpoint.keras.given_names import check_names, shown_hashings
from tpuembed.errors import CheckpointMismatchError, ConfigError, warn
from tpuembed.files import FilePath, as_path
from tpuembed.manifest import VocabularyEntry
from tpuembed.vocabulary import Vocabulary
from tpuembed.vocabulary.model_files import (
    LayerVocabulary,
    boundary_entries,
    hashing_of,
    is_model_file,
    read_vocabularies,
    snake_case,
    special_entries,
)

__all__ = ["compare_vocabularies", "nodes_below", "vocabularies_of"]

_LOOKUPS: Final = (keras.layers.StringLookup, keras.layers.IntegerLookup)
_CHUNK: Final = 1 << 16


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
            kind, hashing = snake_case(type(owner).__name__), hashing_of(vars(node))
            found.append(LayerVocabulary(owner.name, kind, functools.partial(_entries, node), hashing=hashing))
        elif isinstance(node, keras.layers.Discretization) and node.bin_boundaries is not None:
            bounds = functools.partial(boundary_entries, list(node.bin_boundaries))
            found.append(LayerVocabulary(node.name, snake_case(type(node).__name__), bounds))
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

    A layer with a name of its own is compared with the layer of that name. Layers whose names Keras has numbered are compared with
    such layers of the file, in the order in which they were made: the vocabularies of the side that has fewer must be among the
    others'. A warning names the layers that are compared with nothing.

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
    _, saved = read_vocabularies(path, {one.layer for one in mine})
    if given:
        check_names(given, saved, source, "factory")
    pairs, left = _pairs(mine, saved, source)
    # Models inside of the model may have layers of one name.
    unclear = {one for one in mine if any(one.layer == other.layer and not _is_same(one, other) for other in saved)}
    equal = {
        one for one, other in pairs if other.entries is not None and (one.number is not None or one not in unclear)
    }
    paired, known = {one for one, _ in pairs}, [other for other in left if other.entries is not None]
    if known:  # of a layer that was renamed, if it can be no other
        equal |= {one for one in mine if one not in paired and all(_is_same(one, other) for other in known)}
    unknown = [one for one in mine if one not in equal]
    if unknown:
        warn(_not_compared(unknown, known, source))
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
) -> tuple[list[tuple[LayerVocabulary, LayerVocabulary]], list[LayerVocabulary]]:
    """Layers of the factory with those of the file, whose vocabularies are equal, or not known; and the rest of the file.

    Raises:
        CheckpointMismatchError: see `compare_vocabularies`.
    """
    pairs, left = list[tuple[LayerVocabulary, LayerVocabulary]](), list(saved)
    for one in (one for one in mine if one.number is None):
        named = [other for other in left if other.number is None and other.layer == one.layer]
        same = next((other for other in named if _is_same(one, other)), None)
        if named and same is None:
            raise _differs(one, named[0], source)
        if same is not None:
            pairs.append((one, same))
            left.remove(same)
    numbered, others = (sorted((one for one in side if one.number is not None), key=_made_as) for side in (mine, left))
    few, many = sorted((numbered, others), key=len)  # the factory may leave some out, or add some
    begin = 0
    for one in few:
        found = next((place for place in range(begin, len(many)) if _is_same(one, many[place])), None)
        other = many[min(begin, len(many) - 1) if found is None else found]
        pair = (one, other) if few is numbered else (other, one)
        if found is None:
            raise _differs(*pair, source)
        pairs.append(pair)
        left.remove(pair[1])
        begin = found + 1
    return pairs, left


def _made_as(vocabulary: LayerVocabulary) -> tuple[str, int, str]:
    """Return a sort key that orders layers of one class by their generated numbers, and so by creation."""
    number = vocabulary.number
    return vocabulary.kind, -1 if number is None else number, vocabulary.layer


def _differs(mine: LayerVocabulary, saved: LayerVocabulary, source: str | FilePath) -> CheckpointMismatchError:
    begin = f"model file {source}: layer {mine.layer!r} of the factory has another vocabulary than the trained {saved.layer!r}. "
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
