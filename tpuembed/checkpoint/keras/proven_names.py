"""Compares names that a user gives for the rows of tables with the lookups of a trained model in a `.keras` file.

The file proves them where it says which lookup's outputs are the table's ids, and what the lookup takes: the model is functional
or sequential, as are the models inside of it, our layer takes the output of Keras' own StringLookup or IntegerLookup itself, and
that takes an input of the model, of a type that leaves names as they are. All else proves nothing.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np

from tpuembed.checkpoint.keras.trained_vocabularies import (
    LayerVocabulary,
    described_objects,
    hashing_of,
    is_model_file,
    is_of_keras,
    read_vocabularies,
    shown_hashings,
    vocabularies_in,
)
from tpuembed.errors import CheckpointMismatchError, warn
from tpuembed.files import FilePath, as_path
from tpuembed.vocabulary import Vocabulary

__all__ = ["check_names", "check_names_in"]

_LIMITS: Final = {
    name: np.iinfo(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}
_REMEDY: Final = (
    "Take them from there with read_vocabulary, or export with a factory that makes the lookup layer too. If set_vocabulary "
    "replaced the list that the layer was made with, Keras saved the old one: then export from a TensorFlow checkpoint"
)


class _TrainedLookup(NamedTuple):
    """What is known of the lookup before a feature.

    Attributes:
        vocabulary: of the lookup.
        dtypes: of the model's inputs that the lookup takes.
    """

    vocabulary: LayerVocabulary
    dtypes: frozenset[str]


def check_names_in(given: Mapping[str, Vocabulary], source: str | FilePath, giver: str) -> None:
    """Compare names with the lookups of the model in `source`, if it is a `.keras` file or its folder; see `check_names`."""
    path = as_path(source)
    if given and is_model_file(path):
        check_names(given, *read_vocabularies(path, ()), source, giver)


def check_names(
    given: Mapping[str, Vocabulary],
    config: Any,
    saved: Sequence[LayerVocabulary],
    source: str | FilePath,
    giver: str,
) -> None:
    """Compare names that a user gives with the trained model's lookups. A warning names the tables that this cannot prove.

    Args:
        given: table -> its names.
        config: the trained model's.
        saved: the file's vocabularies.
        source: the file, for messages.
        giver: what gives the names, for messages: "factory" or "serving_config".

    Raises:
        CheckpointMismatchError: the names of a table, or the rows of its unknown names, are those of none of its lookups.
    """
    of_tables, unproven = _lookups_of_tables(config, saved), []
    for table, vocabulary in given.items():
        lookups = of_tables.get(table, [None])
        known = [one for one in lookups if one is not None]
        names = vocabulary.names(np.arange(vocabulary.oov_buckets, vocabulary.rows)) if known else []
        hashing = hashing_of({"num_oov_indices": vocabulary.oov_buckets, "vocabulary_dtype": vocabulary.dtype})
        same = [one for one in known if _has_names(one.vocabulary, vocabulary.oov_buckets, names)]
        fits = [one for one in same if one.vocabulary.hashing == hashing]
        if len(fits) == len(lookups) and all(_take_all(one.dtypes, names) for one in fits):
            continue
        if fits or len(known) < len(lookups):
            unproven.append(table)
        elif same:
            hashings = shown_hashings(hashing, same[0].vocabulary.hashing, giver)
            raise CheckpointMismatchError(
                f"model file {source}: unknown names of table {table!r} get rows {hashings}, of layer "
                f"{same[0].vocabulary.layer!r}. {_REMEDY}"
            )
        else:
            shown = dict.fromkeys(
                f"{one.vocabulary.layer!r} ({_difference(one.vocabulary, vocabulary)})" for one in known
            )
            raise CheckpointMismatchError(
                f"model file {source}: the {giver} gives the names of table {table!r}, {len(names)} after {vocabulary.oov_buckets} "
                f"rows for unknown ones, and the file has others, of layer {', '.join(shown)}. {_REMEDY}"
            )
    if unproven:
        tables = ", ".join(map(repr, unproven))
        warn(
            f"model file {source}: the names that the {giver} gives cannot be compared with the training: the file does not say "
            f"which names the rows of {f'table {tables}' if len(unproven) == 1 else f'tables {tables}'} had. If they differ, the "
            "export answers with the rows of other names. Make sure that they are the same"
        )


def _take_all(dtypes: frozenset[str], names: Sequence[Any]) -> bool:
    """Return True if inputs of these types take each name, and no other value becomes a name by a cast.

    Keras casts what a model gets to the types of its inputs, those of an inner model too.
    """
    if dtypes == {"string"}:
        return True
    limits = _LIMITS.get(next(iter(dtypes))) if len(dtypes) == 1 else None
    return limits is not None and all(limits.min <= name <= limits.max for name in names)


def _difference(lookup: LayerVocabulary, given: Vocabulary) -> str:
    """Return in what a lookup differs from the names that are given: their number, or the first row with another name."""
    first = given.oov_buckets
    if (lookup.buckets, lookup.described.size) == (first, given.rows):
        assert lookup.entries is not None
        pairs = zip(given.names(np.arange(first, given.rows)), islice(lookup.entries(), first, None), strict=True)
        for row, (mine, its) in enumerate(pairs, first):
            if _as_entry(mine) != its:
                return f"row {row} is {its!r} there, and {mine!r} here"
    if lookup.buckets == -1:
        return f"{lookup.described.size} entries, with a mask before the names"
    return f"{lookup.described.size - (lookup.buckets or 0)} after {lookup.buckets}"


def _lookups_of_tables(config: Any, saved: Sequence[LayerVocabulary]) -> dict[str, list[_TrainedLookup | None]]:
    """Return table -> the lookups whose outputs are the ids of its features, in all calls of its layer.

    They are known where the module says that the file proves them. None stands for every other feature.
    """
    calls, inputs_of = dict[int, list[Any]](), dict[int, tuple[Mapping[str, Any], ...]]()
    _walk(config, (), calls, inputs_of)
    found: dict[str, list[_TrainedLookup | None]] = {}
    for described, fields in described_objects(config):
        features = fields.get("feature_config")
        if not isinstance(features, Mapping):
            continue
        is_ours = str(described.get("registered_name")).startswith("tpuembed>")
        for call in (calls.get(id(fields)) if is_ours else None) or [None]:
            for table, layer in _links(features.get("features"), call):
                inputs = inputs_of.get(id(layer))
                vocabulary = None if inputs is None else _of_lookup(layer, saved)
                lookup = None
                if vocabulary is not None and inputs is not None:
                    lookup = _TrainedLookup(vocabulary, frozenset(str(one["config"].get("dtype")) for one in inputs))
                if lookup not in found.setdefault(table, []):
                    found[table].append(lookup)
    return found


def _walk(
    model: Any,
    above: tuple[Mapping[str, Any], ...] | None,
    calls: dict[int, list[Any]],
    inputs_of: dict[int, tuple[Mapping[str, Any], ...]],
) -> None:
    """Find what the layers of a functional or sequential model take, and those of the models inside of it.

    A model in the config of another class is left out: that class may call its layers in another way.

    Args:
        model: as a config describes it.
        above: the InputLayers of the models around it that its inputs come from; None if something else makes its inputs.
        calls: gets the layers that each call of a layer takes, by the identity of the layer's config.
        inputs_of: gets the InputLayers, of this model and those around it, of each layer that takes nothing else, by its identity.
    """
    is_model = isinstance(model, Mapping) and model.get("class_name") in ("Functional", "Sequential")
    fields = model.get("config") if is_model and is_of_keras(model) else None
    listed = fields.get("layers") if isinstance(fields, Mapping) else None
    layers = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    by_name = {str(layer.get("name")): layer for layer in layers}
    for before, layer in zip([None, *layers], layers, strict=False):
        is_sequential = model["class_name"] == "Sequential"
        taken = [before] if is_sequential else _taken(layer.get("inbound_nodes"), by_name)
        calls.setdefault(id(layer.get("config")), []).extend(taken)
        inputs = _inputs(taken)
        whole = None if above is None or inputs is None else (*above, *inputs)
        if whole is not None:
            inputs_of[id(layer)] = whole
        _walk(layer, whole, calls, inputs_of)


def _inputs(taken: Any) -> list[Mapping[str, Any]] | None:
    """Return the InputLayers that a call takes; see `_taken`. None if it takes something else, or nothing."""
    if isinstance(taken, Mapping) and isinstance(taken.get("class_name"), str):
        is_input = (
            taken["class_name"] == "InputLayer" and is_of_keras(taken) and isinstance(taken.get("config"), Mapping)
        )
        return [taken] if is_input else None
    children = list(taken.values()) if isinstance(taken, Mapping) else taken if isinstance(taken, list) else []
    found: list[Mapping[str, Any]] = []
    for child in children:
        inputs = _inputs(child)
        if inputs is None:
            return None
        found += inputs
    return found or None


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


def _of_lookup(layer: Mapping[str, Any], saved: Sequence[LayerVocabulary]) -> LayerVocabulary | None:
    """Return the vocabulary of a Keras lookup: the one of its config, or an adapted one. None for another or unknown one."""
    kind, fields = layer["class_name"], layer.get("config")
    if kind not in ("StringLookup", "IntegerLookup") or not is_of_keras(layer) or not isinstance(fields, Mapping):
        return None
    if str(fields.get("encoding") or "utf-8").lower() not in ("utf-8", "utf8"):  # names are decoded, and saved as UTF-8
        return None
    dtypes = (None, "string" if kind == "StringLookup" else "int64")
    if (
        (fields.get("output_mode") or "int") != "int"
        or fields.get("invert")
        or fields.get("vocabulary_dtype") not in dtypes
    ):
        return None
    adapted = [one for one in saved if one.is_adapted and one.layer == fields.get("name")]
    found = next(vocabularies_in(kind, fields), adapted[0] if len(adapted) == 1 else None)
    return None if found is None or None in (found.entries, found.buckets) else found


def _has_names(saved: LayerVocabulary, buckets: int, names: Sequence[Any]) -> bool:
    """Return True if `saved` has `names`, in this order, after its buckets."""
    assert saved.entries is not None
    if saved.buckets != buckets or saved.described.size != buckets + len(names):
        return False
    return all(map(operator.eq, islice(saved.entries(), buckets, None), map(_as_entry, names)))


def _as_entry(name: bytes | int) -> bytes:
    """Return a name of a vocabulary as entries of lookups are."""
    return str(name).encode() if isinstance(name, int) else name
