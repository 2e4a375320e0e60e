"""Opens checkpoints of every supported format behind one protocol, `Checkpoint`.

To add a format, write one folder with a class of that protocol and name it in `formats`.
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
    reason,
)
from tpuembed.files import FilePath, MissingBucketError, as_path

__all__ = ["Checkpoint", "Format", "TableInfo", "find_format", "formats", "open_checkpoint"]


class Format(Protocol):
    """A reader of one on-disk format."""

    @property
    def accepted_options(self) -> frozenset[str]:
        """Return the names of the options that `open` accepts."""

    @property
    def kind(self) -> str:
        """Return a short description of the format for people."""

    def recognises(self, path: FilePath) -> bool:
        """Returns True if `path`, on a disk or a URL, is of this format."""

    def open(self, path: FilePath, options: Mapping[str, Any]) -> Checkpoint:
        """Open the checkpoint at `path`, which `recognises` accepts; `options` are among `accepted_options`.

        Raises:
            ConfigError: the value of an option is invalid, or contradicts the checkpoint.
            CheckpointError: as `open_checkpoint`.
        """


@functools.cache
def formats() -> tuple[Format, ...]:
    """Return the readers, in the order in which they are tried. They are imported when a checkpoint is opened."""
    from tpuembed.checkpoint.bundle.checkpoint import BundleCheckpoint
    from tpuembed.checkpoint.keras import KerasCheckpoint
    from tpuembed.checkpoint.orbax import OrbaxCheckpoint

    return OrbaxCheckpoint, BundleCheckpoint, KerasCheckpoint


def find_format(path: FilePath) -> Format | None:
    """Return the format that reads `path`, or None.

    Raises:
        CheckpointFormatError: `path` is a directory with checkpoints of several formats.
    """
    if not path.is_dir():
        return next((reader for reader in formats() if reader.recognises(path)), None)
    found, errors = list[Format](), list[CheckpointError]()
    for reader in formats():
        try:
            found += [reader] if reader.recognises(path) else []
        except CheckpointFormatError:  # several of one format: `open` raises it again
            found.append(reader)
        except CheckpointError as error:  # such as a file `checkpoint` that is not TensorFlow's
            errors.append(error)
    if len(found) > 1:
        raise CheckpointFormatError(
            f"directory {path}: contains {' and '.join(reader.kind for reader in found)}. Give the path of one of them."
        )
    if errors and not found:
        raise errors[0]
    return found[0] if found else None


def open_checkpoint(path: str | FilePath, **options: Any) -> Checkpoint:
    """Open the checkpoint at `path` with the format that recognises it.

    Args:
        path: a prefix (`ckpt-1`), a directory (its latest checkpoint), a `.index` or `.data-` file, or a SavedModel; on
            a disk, or as s3:// or gs:// URL.
        options: facts that the files do not contain, for formats that need them.

    Raises:
        ConfigError: an option is unknown, does not apply to this checkpoint, or has an invalid value.
        CheckpointNotFoundError: there is no checkpoint.
        CheckpointFormatError: no format can read it, several can, or it has no table.
        CheckpointCorruptError: the files contradict themselves.
        CheckpointError: the system or the store refuses to read them.
        MissingExtraError: a URL needs a package that is not installed.
    """
    if not isinstance(path, str | os.PathLike | FilePath):
        raise ConfigError(f"open_checkpoint: path must be a path or a URL, got {path!r}.")
    try:
        place, known = as_path(path), frozenset[str]().union(*(reader.accepted_options for reader in formats()))
        check_keys("checkpoint options", options, known)
        reader = find_format(place)
        if reader is None:
            looked_for = (
                "a `checkpoint` file, *.index, saved_model.pb with variables, Keras weights or an Orbax checkpoint"
            )
            if place.is_dir():
                problem = f"this directory contains none (looked for {looked_for}). Give the path of one"
            elif place.exists():
                problem = "this file is not part of one. Give the checkpoint's prefix, such as ckpt-1"
            else:
                problem = f"no such file, directory or prefix (looked for {place}.index). Check the path"
            raise CheckpointNotFoundError(f"checkpoint {place}: {problem}.")
        for name in sorted(options.keys() - reader.accepted_options):
            raise ConfigError(
                f"checkpoint {place}: option {name!r} is not supported for this checkpoint format. Leave it out."
            )
        return reader.open(place, options)
    except TpuEmbedError:
        raise
    except MissingBucketError as error:
        raise CheckpointNotFoundError(f"checkpoint {path}: {error.strerror}. Check the URL.") from None
    except (OSError, ValueError) as error:  # a name that is too long or has a zero byte
        file = str(error.filename or "") if isinstance(error, PermissionError) else ""
        where = f"{file}: " if file and "://" not in file else ""  # the credentials are for the whole store
        raise CheckpointError(f"checkpoint {path}: {where}cannot be read: {reason(error)}.") from None
