"""The vocabularies of a trained model's preprocessing layers, as a `.keras` file or its folder holds them.

Where they are: in `vocabulary.txt` among the assets, if the layer was adapted, wherever the layer is; in the config of the layer,
if it was given, and the layer's config is in the model's (functional and sequential models, nested ones, and objects whose own
config holds layers). Of a layer that the code of a class makes with a given vocabulary, the file has the name alone, beside the
weights.
"""

import dataclasses
import functools
import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import IO, Any, Final

import numpy as np

from tpuembed.errors import CheckpointCorruptError, CheckpointError, reason
from tpuembed.files import FilePath, names_below, open_stream
from tpuembed.manifest import VocabularyEntry

__all__ = [
    "LayerVocabulary",
    "boundary_entries",
    "described_objects",
    "given_entries",
    "hashing_of",
    "is_model_file",
    "read_vocabularies",
    "snake_case",
    "special_entries",
]

_CONFIG, _WEIGHTS, _VOCABULARY = "config.json", "model.weights.h5", "vocabulary.txt"
_KINDS: Final = ("string_lookup", "integer_lookup", "text_vectorization")


@dataclasses.dataclass(frozen=True, eq=False)
class LayerVocabulary:
    """One vocabulary.

    Attributes:
        layer: the layer's name; "" if it is not known.
        kind: its class, in snake case.
        entries: gives them as UTF-8, in the order of their numbers; None where they are not known. They are not, if the file has
            another number of them than the layer had, or one ends with NUL: Keras looks that up without it.
        hashing: how an unknown word gets one of several entries, "" if there are not several; None where it is not known. It has
            the salt, which no message shows.
        buckets: how many entries of unknown words it begins with; -1 if a mask is before them; None where it is not known.
    """

    layer: str
    kind: str
    entries: Callable[[], Iterable[bytes]] | None
    hashing: str | None = None
    buckets: int | None = None

    @functools.cached_property
    def described(self) -> VocabularyEntry:
        """Its size and its digest, which reads all of it."""
        digest, size = hashlib.sha256(), 0
        for entry in self.entries() if self.entries else ():
            digest.update(b"%d:%s," % (len(entry), entry))
            size += 1
        return VocabularyEntry(layer=self.layer, size=size, sha256=digest.hexdigest())

    @property
    def number(self) -> int | None:
        """Return the number in a generated Keras name, 3 for string_lookup_3, 0 for string_lookup; else None."""
        match = re.fullmatch(rf"{re.escape(self.kind)}(?:_(\d+))?", self.layer) if self.kind else None
        return int(match[1] or 0) if match else None


def is_model_file(path: FilePath) -> bool:
    """Return True if `path` is a `.keras` file, or the weights of one that was saved unzipped."""
    return path.is_file() and (path.suffix == ".keras" or _is_unzipped(path))


def _is_unzipped(path: FilePath) -> bool:
    return path.name == _WEIGHTS and (path.parent / _CONFIG).is_file()


def read_vocabularies(path: FilePath, layers: Iterable[str]) -> tuple[Any, list[LayerVocabulary]]:
    """The config and the vocabularies of a saved model; see the module.

    Layers whose names alone are known, as theirs that code made with a vocabulary, are there without their entries: those that
    Keras has numbered, and those called like one of `layers`.

    Raises:
        CheckpointCorruptError: they cannot be read.
    """
    try:
        if _is_unzipped(path):
            return _of_archive(_Folder(path.parent), layers)
        with open_stream(path) as file, zipfile.ZipFile(file) as archive:
            return _of_archive(archive, layers)
    except OSError as error:
        raise CheckpointError(f"model file {path}: cannot be read: {reason(error)}.") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise CheckpointCorruptError.of(f"model file {path}: cannot be unpacked: {error}") from None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointCorruptError.of(f"model file {path}: its config cannot be read: {error}") from None


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


def _of_archive(archive: zipfile.ZipFile | _Folder, layers: Iterable[str]) -> tuple[Any, list[LayerVocabulary]]:
    config = json.loads(archive.read(_CONFIG))
    found: list[LayerVocabulary] = []
    adapted: dict[str, set[tuple[str, int, int | None]]] = {}
    for described, fields in described_objects(config):
        try:
            its = list(_vocabularies_in(str(described["class_name"]), fields))
            options = {(hashing_of(fields), _buckets(fields), fields.get("vocabulary_size"))}
        except (TypeError, ValueError, OverflowError):
            # A user's layer may have other values by the names of Keras' options, also a subclass of one of Keras' layers.
            is_registered = described.get("registered_name") not in (None, described.get("class_name"))
            if str(described.get("module")).partition(".")[0] == "keras" and not is_registered:
                raise
            continue
        found += its
        if "num_oov_indices" in fields:
            adapted.setdefault(str(fields.get("name")), set()).update(options)
    names = _names_by_place(archive)
    for name in archive.namelist():
        place = PurePosixPath(name).parent
        # A TextVectorization writes the vocabulary of its lookup layer a second time, as its own.
        is_asset = place.parts[:1] == ("assets",) and PurePosixPath(name).name == _VOCABULARY
        if is_asset and place.name != "_lookup_layer":
            content = archive.read(name)
            entries = content.split(b"\n")
            layer = names.get(str(place.relative_to("assets")), "")
            # In a list of layers the place is called by the class, else by an attribute.
            kind = _without_number(place.name) if place.parent.name == "layers" else _kind_of(layer)
            choices = list(adapted.get(layer, ()))  # several, if layers in several models have this name
            hashing, buckets, size = choices[0] if len(choices) == 1 else (None, None, None)
            # An entry with a line end is several lines. On Windows lines end with two characters.
            is_known = size in (None, len(entries)) and not re.search(rb"\0(\n|$)|\r\n", content)
            found.append(
                LayerVocabulary(
                    layer,
                    kind,
                    functools.partial(iter, entries) if is_known else None,
                    hashing=hashing,
                    buckets=buckets,
                )
            )
    # A layer that two of the config's models share is in it twice.
    kept = {
        (one.layer or str(number), one.kind, one.described.sha256, one.hashing): one for number, one in enumerate(found)
    }
    known = {vocabulary.layer for vocabulary in found}
    others = {name for place, name in names.items() if name not in known and not place.endswith("/_lookup_layer")}
    nameless = [name for name in sorted(others) if _kind_of(name) or name in layers]
    return config, [*kept.values(), *(LayerVocabulary(name, _kind_of(name), None) for name in nameless)]


def _kind_of(name: str) -> str:
    """Return the class in a generated Keras name; "" for another name."""
    kind = _without_number(name)
    return kind if kind in _KINDS else ""


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


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


def described_objects(config: Any) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """(description, config) of every object that `config` describes, at any depth."""
    if isinstance(config, Mapping):
        fields = config.get("config")
        if isinstance(config.get("class_name"), str) and isinstance(fields, Mapping):
            yield config, fields
        for child in config.values():
            yield from described_objects(child)
    elif isinstance(config, list):
        for child in config:
            yield from described_objects(child)


def _vocabularies_in(class_name: str, fields: Mapping[str, Any]) -> Iterator[LayerVocabulary]:
    """Yield the vocabulary of a layer whose config is `fields`, if the config has one."""
    kind, name = snake_case(class_name), str(fields.get("name", ""))
    words = words_of(fields)
    if words and (class_name == "TextVectorization" or "num_oov_indices" in fields):
        is_text = class_name == "TextVectorization"  # the config of its lookup layer
        mask, oov, count = (
            ("", "[UNK]", 1) if is_text else [fields.get(k) for k in ("mask_token", "oov_token", "num_oov_indices")]
        )
        special = special_entries(mask, oov, int(count or 0), str(fields.get("output_mode") or "int"))
        hashing, buckets = ("", None) if is_text else (hashing_of(fields), _buckets(fields))
        entries = given_entries(special, words)
        if not is_text and not _has_size(fields, len(entries)):  # Keras does not take bytes for its tokens
            entries = [*special, *given_entries([], words)]
        is_known = (is_text or _has_size(fields, len(entries))) and not any(one.endswith(b"\0") for one in entries)
        yield LayerVocabulary(
            name, kind, functools.partial(iter, entries) if is_known else None, hashing=hashing, buckets=buckets
        )
    bounds = fields.get("bin_boundaries")
    if isinstance(bounds, list) and bounds:
        yield LayerVocabulary(name, kind, functools.partial(iter, boundary_entries(bounds)))


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


def _has_size(fields: Mapping[str, Any], size: int) -> bool:
    """Return True unless the config of a lookup says that the trained layer had another number of entries."""
    return fields.get("vocabulary_size") in (None, size)


def hashing_of(settings: Mapping[str, Any]) -> str:
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
    """Return `LayerVocabulary.buckets` of a lookup layer's config."""
    has_mask = fields.get("mask_token") is not None and (fields.get("output_mode") or "int") == "int"
    return -1 if has_mask else int(fields.get("num_oov_indices") or 0)


def special_entries(mask: Any, oov: Any, count: int, mode: str) -> list[bytes]:
    """Return the entries before the first word."""
    masks = [str(mask).encode()] if mask is not None and mode == "int" else []
    return masks + [str(oov).encode()] * count


def given_entries(special: list[bytes], words: Iterable[Any]) -> list[bytes]:
    """The entries of a layer that is given `words`; Keras takes them with the special ones or without."""
    entries = [str(word).encode() for word in words]
    return special + (entries[len(special) :] if entries[: len(special)] == special else entries)


def boundary_entries(bounds: Iterable[Any]) -> list[bytes]:
    """Return the entries of a Discretization layer, float32 as Keras compares them."""
    return [repr(float(np.float32(bound))).encode() for bound in bounds]


def snake_case(name: str) -> str:
    """Source: to_snake_case in keras/src/utils/naming.py."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
