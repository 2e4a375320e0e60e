"""Checkpoints on disk, whatever wrote them, behind one protocol. To add a format: one module, one name in `formats`.

types             the protocol, and what a table is
location          from a user's path to the prefix of a bundle
object_graph      the objects that a TensorFlow 2 checkpoint remembers
discovery         which tensors are tables: own_layer, mid_level, plain_variables; table_keys is what they find
keras_optimizers  Keras' optimizers by their attributes; keras_2_slots: slots that only names tell whose they are
not_tables        what there is under a name that is no table's or slot's, for error messages
rows              how a table's rows lie in its tensor, chosen once: in order, tpu_v1, sparsecore, partitioned
interleaved       rows that are dealt out in turn, put back in order
bundle_checkpoint the reader of all of these
keras_rs          weight files of Keras 3: a package of its own
orbax             what Orbax wrote for JAX: a package of its own
"""

import functools
import os
from collections.abc import Mapping
from typing import Any, Protocol

from tpuembed.checkpoint.types import Checkpoint, TableInfo
from tpuembed.config.checks import check_keys
from tpuembed.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    ConfigError,
    TpuEmbedError,
)
from tpuembed.files import FilePath, MissingBucketError, as_path

__all__ = ["Checkpoint", "Format", "TableInfo", "find_format", "formats", "open_checkpoint"]


class Format(Protocol):
    """A reader of one on-disk format."""

    @property
    def accepted_options(self) -> frozenset[str]:
        """The names of the options that `open` knows."""

    @property
    def kind(self) -> str:
        """What it reads, in a few words for people."""

    def recognises(self, path: FilePath) -> bool:
        """Whether `path`, on a disk or a URL, is of this format."""

    def held_in(self, directory: FilePath) -> FilePath | None:
        """A file or folder of this format that giving `directory` may mean, as a path that means nothing else; or None.

        It reads no payload, and raises nothing where there are several.
        """

    def open(self, path: FilePath, options: Mapping[str, Any]) -> Checkpoint:
        """The checkpoint at `path`, which `recognises` accepts; `options` are among `accepted_options`.

        Raises:
            ConfigError: an option has a value that it cannot have, or says what the checkpoint leaves no room for.
        """


@functools.cache
def formats() -> tuple[Format, ...]:
    """The readers, in the order in which they are asked; imported when a checkpoint is opened, which not every program does."""
    from tpuembed.checkpoint.bundle.checkpoint import BundleCheckpoint
    from tpuembed.checkpoint.keras import KerasCheckpoint
    from tpuembed.checkpoint.orbax import OrbaxCheckpoint

    return OrbaxCheckpoint, BundleCheckpoint, KerasCheckpoint


def find_format(path: FilePath) -> Format | None:
    """The format that reads what is at `path`, or None.

    Raises:
        CheckpointFormatError: `path` is a directory that holds checkpoints of several formats, or several of one.
    """
    found = next((reader for reader in formats() if reader.recognises(path)), None)
    if found is None or not path.is_dir():
        return found
    held = [(reader.kind, place) for reader in formats() if (place := reader.held_in(path))]
    if len(held) > 1:
        raise CheckpointFormatError(
            f"directory {path}: holds {' and '.join(f'{kind} ({place})' for kind, place in held)}, and which is meant cannot "
            "be told; give the path of that one"
        )
    return found


def open_checkpoint(path: str | FilePath, **options: Any) -> Checkpoint:
    """Open the checkpoint at `path`: the format that recognises it reads it.

    Args:
        path: a prefix (`ckpt-1`), a directory (its latest), a `.index` or `.data-` file, or a SavedModel; on a disk, or
            as s3:// or gs:// URL.
        options: what the files do not say, where a format needs it.

    Raises:
        ConfigError: an option is unknown, does not apply to what is there, or has a value that it cannot have.
        CheckpointNotFoundError: nothing is there.
        CheckpointFormatError: no format reads what is there, several do, or it holds no table.
        CheckpointCorruptError: the files contradict themselves.
        CheckpointError: the system or the store refuses to read them.
        MissingExtraError: a URL is read by a package that is not installed.
    """
    if not isinstance(path, str | os.PathLike | FilePath):
        raise ConfigError(f"open_checkpoint: path must be a path or a URL, got {path!r}")
    try:
        return _open(as_path(path), options)
    except TpuEmbedError:
        raise
    except MissingBucketError as error:
        raise CheckpointNotFoundError(f"checkpoint {path}: {error.strerror}; check the URL") from None
    except PermissionError as error:
        is_told = not error.filename or "://" in str(error.filename)  # credentials are of all of a store
        where = "" if is_told else f" (of {error.filename})"
        raise CheckpointError(f"checkpoint {path}: cannot be read: {error.strerror or error}{where}") from None
    except (OSError, ValueError) as error:  # a name too long or with a zero byte
        raise CheckpointError(f"checkpoint {path}: cannot be read: {error}") from None


def _open(path: FilePath, options: Mapping[str, Any]) -> Checkpoint:
    check_keys(
        "checkpoint options", options, frozenset[str]().union(*(reader.accepted_options for reader in formats()))
    )
    reader = find_format(path)
    if reader is None:
        raise CheckpointNotFoundError(f"checkpoint {path}: {_nothing_there(path)}")
    _check_options(path, reader, options)
    return reader.open(path, options)


def _check_options(path: FilePath, reader: Format, options: Mapping[str, Any]) -> None:
    for name in sorted(options.keys() - reader.accepted_options):
        raise ConfigError(f"checkpoint {path}: option {name!r} is for another format than this one; leave it out")


def _nothing_there(path: FilePath) -> str:
    looked_for = "a `checkpoint` file, *.index, saved_model.pb with variables, Keras weights or an Orbax checkpoint"
    if path.is_dir():
        return f"this directory holds none (looked for {looked_for}); give the path of one"
    if path.exists():
        return "this file is no part of one; give the checkpoint's prefix, such as ckpt-1"
    return f"no such file, directory or prefix (looked for {path}.index); check the path"
